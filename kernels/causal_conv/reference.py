"""Reference causal depthwise convolution, the oracle of tests."""

from __future__ import annotations

import torch


def causal_conv_reference(
    x: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Convolve one sequence, token by token, in float64; the oracle of tests.

    Args:
        x: `[n, C]`.
        weight: `[C, K]`.
        tail: `[C, K - 1]` or None for zeros.

    Returns:
        (output `[n, C]` float64, the tails after 0, 1, ... n tokens, `[n + 1, C, K - 1]` in x's
        dtype).
    """
    channels, width = weight.shape
    window = x.new_zeros(channels, width - 1) if tail is None else tail
    outputs, tails = [], [window]
    for token in x:
        seen = torch.cat([window, token[:, None]], dim=1)
        total = (seen.double() * weight.double()).sum(1)
        outputs.append(total * torch.sigmoid(total))
        window = seen[:, 1:]
        tails.append(window)
    empty = x.new_zeros(0, channels, dtype=torch.float64)
    return torch.stack(outputs) if outputs else empty, torch.stack(tails)
