"""Adam for all learners, with gradient clipping, skipped non-finite steps and loss scaling for float16, on the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from redline.engine.runtime import Runtime

_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-5
_GROWTH_INTERVAL = 2000.0  # finite steps until the float16 loss scale doubles


def flatten(module: nn.Module) -> Tensor:
    """Move all parameters of `module` into one vector (P,), turn them into views of the vector, and return it.

    Clipping, Adam and the update of a target network are then one kernel each, for any number of layers.
    """
    parameters = list(module.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    start = 0
    for p in parameters:
        p.data = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    return flat


def linear(start: float, end: float, progress: Tensor) -> Tensor:
    """Return the value () between start and end at `progress` () from 0 to 1; constant outside."""
    return start + (end - start) * progress.clamp(0.0, 1.0)


def annealed_discount(start: float, end: float, progress: Tensor) -> Tensor:
    """Return the discount () at `progress` (): its effective horizon 1 / (1 - discount) changes linearly from start to end."""
    return 1 - 1 / linear(1 / (1 - start), 1 / (1 - end), progress)


class Optimizer:
    """Adam with gradient clipping; a step with a non-finite gradient is skipped and counted in `skipped`.

    Written out instead of using torch.optim: on one vector it compiles to a single kernel, together with clipping and the
    check. Without `fused_optimizer` each parameter is updated separately, as in torch.optim without fusion.
    """

    def __init__(self, module: nn.Module, learning_rate: float | Tensor, max_norm: float, runtime: Runtime) -> None:
        # If the learning rate is a () tensor, it can change between replays of a captured graph.
        self.learning_rate, self.max_norm = learning_rate, max_norm
        self.flat = flatten(module)
        self.parameters = list(module.parameters())
        self.mean = torch.zeros_like(self.flat)  # of gradients (P,)
        self.square = torch.zeros_like(self.flat)  # mean of squared gradients
        self.fused = runtime.fused_optimizer
        self.steps = torch.zeros((), device=runtime.device)
        self.rate_factor = torch.ones((), device=runtime.device)  # of the learning rate; below 1 after a rollback
        self.skipped = torch.zeros((), dtype=torch.int64, device=runtime.device)
        self.skipped_in_row = torch.zeros_like(self.skipped)  # since the last finite gradient
        self.scaled = runtime.amp_dtype == torch.float16
        self.scale = torch.tensor(2.0**15 if self.scaled else 1.0, device=runtime.device)
        self.good = torch.zeros((), device=runtime.device)  # finite steps since the scale last changed
        self.norm_sum = torch.zeros((), device=runtime.device)  # of gradients before clipping, since the last log point

    def gradient(self, loss: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient of the loss for each parameter, times the loss scale."""
        return torch.autograd.grad(loss * self.scale if self.scaled else loss, self.parameters)

    def step(self, gradients: tuple[Tensor, ...], allowed: Tensor | None = None) -> Tensor:
        """Take an Adam step if the scaled gradients are finite and `allowed` () bool; return () bool, whether it was taken."""
        vectors = [g.flatten() for g in gradients]
        if self.fused:
            vectors = [torch.cat(vectors)]
        if self.scaled:
            vectors = [gradient / self.scale for gradient in vectors]
        norms = [torch.linalg.vector_norm(gradient) for gradient in vectors]
        norm = norms[0] if self.fused else torch.linalg.vector_norm(torch.stack(norms))
        finite = torch.isfinite(norm)
        taken = finite if allowed is None else finite & allowed
        self.steps += taken
        # Combine step-dependent factors as scalars: without fusion, every operation reads the vectors again.
        counts = taken.to(torch.float32)
        count = self.steps.clamp(min=1.0)
        for gradient, (weights, mean, square) in zip(vectors, self._parts(), strict=True):
            gradient = torch.where(finite, gradient * (self.max_norm / (norm + 1e-6)).clamp(max=1.0), 0.0)
            mean.lerp_(gradient, (1 - _BETA_1) * counts)
            square.lerp_(gradient.square(), (1 - _BETA_2) * counts)
            spread = square.sqrt().mul_((1 - _BETA_2**count).rsqrt()).add_(_EPSILON)
            weights.addcmul_(mean / spread, -self.learning_rate * self.rate_factor * counts / (1 - _BETA_1**count))
        self.skipped += ~finite
        self.skipped_in_row.copy_(torch.where(finite, 0, self.skipped_in_row + 1))
        self.norm_sum += torch.where(finite, norm, 0.0)
        if self.scaled:
            grow = self.good + 1 >= _GROWTH_INTERVAL
            self.scale.mul_(torch.where(finite, torch.where(grow, 2.0, 1.0), 0.5)).clamp_(min=1.0)
            self.good.copy_(torch.where(finite & ~grow, self.good + 1, 0.0))
        return taken

    def read_metrics(self, updates: int) -> dict[str, float]:
        """Return the mean gradient norm before clipping over the last `updates` steps, the learning rate and skipped steps."""
        norm = float(self.norm_sum) / updates
        self.norm_sum.zero_()
        rate, skipped = float(self.learning_rate) * float(self.rate_factor), int(self.skipped)
        return {"grad_norm": norm, "learning_rate": rate, "skipped_updates": skipped}

    def _parts(self) -> list[tuple[Tensor, ...]]:
        """Return the groups of weights, mean and square that are updated together: one for all, or one per parameter."""
        vectors = self.flat, self.mean, self.square
        if self.fused:
            return [vectors]
        sizes = [p.numel() for p in self.parameters]
        return list(zip(*(vector.split(sizes) for vector in vectors), strict=True))

    def tensors(self) -> dict[str, Tensor]:
        """Return the state to checkpoint."""
        names = ("mean", "square", "steps", "skipped", "scale", "good")
        return {name: getattr(self, name) for name in names}
