"""The optimizer step shared by all learners: clip, skip what is not finite, scale losses for float16. No host round trip."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from redline.engine.runtime import Runtime

_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-5
_GROWTH_INTERVAL = 2000.0  # good steps until the float16 loss scale doubles


def flatten(module: nn.Module) -> Tensor:
    """Move all parameters of `module` into one vector, of which they become views. (P,) in their dtype.

    Clipping, Adam and a target network's update are then one kernel each, however many layers there are.
    """
    parameters = list(module.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    start = 0
    for p in parameters:
        p.data = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    return flat


def linear(start: float, end: float, progress: Tensor) -> Tensor:
    """From start to end as `progress` () goes from 0 to 1, and no farther."""
    return start + (end - start) * progress.clamp(0.0, 1.0)


class Optimizer:
    """Adam over a module with gradient clipping; a step with a non-finite gradient changes nothing but `skipped`.

    Written out, not torch's own: on one flat vector it compiles into a single kernel together with clipping and the check.
    """

    def __init__(self, module: nn.Module, learning_rate: float | Tensor, max_norm: float, runtime: Runtime) -> None:
        # A () tensor can change from replay to replay of a captured graph.
        self.learning_rate, self.max_norm = learning_rate, max_norm
        self.flat = flatten(module)
        self.parameters = list(module.parameters())
        self.mean = torch.zeros_like(self.flat)  # of gradients
        self.square = torch.zeros_like(self.flat)  # mean of squared gradients
        self.steps = torch.zeros((), device=runtime.device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=runtime.device)
        self.scaled = runtime.amp_dtype == torch.float16
        self.scale = torch.tensor(2.0**15 if self.scaled else 1.0, device=runtime.device)
        self.good = torch.zeros((), device=runtime.device)  # finite steps since the scale last changed

    def gradient(self, loss: Tensor) -> tuple[Tensor, ...]:
        """Of the loss by each parameter, times the loss scale."""
        return torch.autograd.grad(loss * self.scale if self.scaled else loss, self.parameters)

    def step(self, gradients: tuple[Tensor, ...], allowed: Tensor | None = None) -> Tensor:
        """One Adam step with scaled gradients, where it is `allowed` () bool. Returns () bool: whether it was taken."""
        gradient = torch.cat([g.flatten() for g in gradients])
        if self.scaled:
            gradient = gradient / self.scale
        norm = torch.linalg.vector_norm(gradient)
        finite = torch.isfinite(norm)
        gradient = torch.where(finite, gradient * (self.max_norm / (norm + 1e-6)).clamp(max=1.0), 0.0)
        taken = finite if allowed is None else finite & allowed
        self.steps += taken
        # What depends on the step is one number each, so that where nothing is fused the vectors are read few times.
        counts = taken.to(torch.float32)
        self.mean.lerp_(gradient, (1 - _BETA_1) * counts)
        self.square.lerp_(gradient.square(), (1 - _BETA_2) * counts)
        count = self.steps.clamp(min=1.0)
        spread = self.square.sqrt().mul_((1 - _BETA_2**count).rsqrt()).add_(_EPSILON)
        self.flat.addcmul_(self.mean / spread, -self.learning_rate * counts / (1 - _BETA_1**count))
        self.skipped += ~finite
        if self.scaled:
            grow = self.good + 1 >= _GROWTH_INTERVAL
            self.scale.mul_(torch.where(finite, torch.where(grow, 2.0, 1.0), 0.5)).clamp_(min=1.0)
            self.good.copy_(torch.where(finite & ~grow, self.good + 1, 0.0))
        return taken

    def tensors(self) -> dict[str, Tensor]:
        """The state to checkpoint."""
        names = ("mean", "square", "steps", "skipped", "scale", "good")
        return {name: getattr(self, name) for name in names}
