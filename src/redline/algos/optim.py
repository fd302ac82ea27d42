"""The optimizer step shared by all learners: clip, skip what is not finite, scale losses for float16. No host round trip."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from redline.core.records import Runtime

_GROWTH_INTERVAL = 2000.0  # good steps until the float16 loss scale doubles


class Optimizer:
    """Adam over `parameters` with gradient clipping; a step with a non-finite gradient changes nothing but `skipped`."""

    def __init__(self, parameters: Sequence[Tensor], learning_rate: float, max_norm: float, runtime: Runtime) -> None:
        self.parameters, self.max_norm = list(parameters), max_norm
        cuda = runtime.device.type == "cuda"
        fused = runtime.device.type in ("cuda", "cpu")
        self.adam = torch.optim.Adam(self.parameters, lr=learning_rate, eps=1e-5, fused=fused, capturable=cuda)
        self.scaled = runtime.amp_dtype == torch.float16
        device = runtime.device
        self.scale = torch.tensor(2.0**15 if self.scaled else 1.0, device=device)
        self.good = torch.zeros((), device=device)  # finite steps since the scale last changed
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """Of the loss, times the loss scale."""
        return list(torch.autograd.grad(loss * self.scale if self.scaled else loss, self.parameters))

    @torch.no_grad()
    def step(self, gradients: list[Tensor]) -> Tensor:
        """One Adam step with scaled `gradients`. Returns () bool: whether it was taken."""
        norm = torch.nn.utils.get_total_norm(gradients) / self.scale
        finite = torch.isfinite(norm)
        factor = (self.max_norm / (norm + 1e-6)).clamp(max=1.0) / self.scale
        torch._foreach_mul_(gradients, factor)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        # The fused kernel reads this attribute, as torch's own GradScaler sets it: the step is skipped on the device.
        self.adam.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
        self.adam.step()
        self.skipped += ~finite
        if self.scaled:
            grow = self.good + 1 >= _GROWTH_INTERVAL
            self.scale.mul_(torch.where(finite, torch.where(grow, 2.0, 1.0), 0.5)).clamp_(min=1.0)
            self.good.copy_(torch.where(finite & ~grow, self.good + 1, 0.0))
        return finite

    def tensors(self) -> dict[str, Tensor]:
        """The state to checkpoint; before the first step the moments are the zeros they will start from."""
        named = {"scale": self.scale, "good": self.good, "skipped": self.skipped}
        for index, parameter in enumerate(self.parameters):
            for name, value in self._moments(parameter).items():
                named[f"{index}.{name}"] = value
        return named

    def load(self, tensors: dict[str, Tensor]) -> None:
        current = self.tensors()
        for name, value in tensors.items():
            current[name].copy_(value)

    def _moments(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.adam.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return dict(state)
