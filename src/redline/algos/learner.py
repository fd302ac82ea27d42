"""What learners have in common with each other: hooks around an iteration, which most do not need."""

from __future__ import annotations


class Hooks:
    """Called by the loop on the host, outside what is compiled and captured."""

    def before(self) -> None:
        """Before each iteration."""

    def after(self) -> None:
        """After each iteration."""

    def loaded(self) -> None:
        """After a checkpoint's tensors were copied into those of `state_dict`."""

    def close(self) -> None:
        """When nothing more will be learned."""
