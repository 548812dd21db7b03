"""Muon for the weight matrices, AdamW for everything else.

Muon (Jordan et al., 2024) replaces the momentum by the nearest orthogonal matrix. On these models
it needs about half of AdamW's steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """Approximate U V^T of each matrix [n, rows, columns] by Newton-Schulz iteration.

    bfloat16 is accurate enough and takes half the time.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x: Tensor = (matrices.transpose(1, 2) if tall else matrices).bfloat16()
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.transpose(1, 2) if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised per matrix; leading dimensions (experts) form a batch."""

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[tuple(parameter.shape[-2:])].append(parameter)
            for shape, parameters in by_shape.items():
                self._step_shape(group, shape, parameters)

    def _step_shape(
        self, group: dict[str, float], shape: tuple[int, ...], parameters: list[nn.Parameter]
    ) -> None:
        updates = []
        for parameter in parameters:
            assert parameter.grad is not None
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
            update = parameter.grad.lerp(state["momentum"], group["momentum"])
            updates.append(update.reshape(-1, *shape))
        turned = orthogonalise(torch.cat(updates))
        scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
        counts = [len(update) for update in updates]
        for parameter, update in zip(parameters, torch.split(turned, counts), strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update.reshape(parameter.shape), alpha=-scale)


def build_optimizers(
    model: nn.Module, *, muon_lr: float, adam_lr: float
) -> list[torch.optim.Optimizer]:
    """Assign matrices of 16 or more rows to Muon, except embeddings and the patch projection."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        inner = parameter.dim() >= 2 and min(parameter.shape[-2:]) >= 16
        plain = any(word in name for word in ("embed", "heads.", "conv1d"))
        (matrices if inner and not plain else others).append(parameter)
    return [
        Muon(matrices, lr=muon_lr, weight_decay=0.02),
        torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
