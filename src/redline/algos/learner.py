"""What learners have in common with each other: hooks around an iteration, which most do not need."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


class Hooks:
    """Called by the loop on the host, outside what is compiled and captured."""

    wants_stacks = False  # final States with all frames that are seen, not with the newest alone

    def before(self) -> None:
        """Before each iteration."""

    def after(self) -> None:
        """After each iteration."""

    def adapt(self, replay: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A checkpoint's memory as it fits into this one's."""
        return replay

    def loaded(self) -> bool:
        """After a checkpoint's tensors were copied into those of `state_dict`; False: its memory is lost."""
        return True

    def interrupted(self) -> bool:
        """All environments begin anew: what was remembered last is followed by nothing. False: the memory is lost."""
        return True

    def close(self) -> None:
        """When nothing more will be learned."""
