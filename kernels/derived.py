"""Values derived from a weight alone: computed once and cached on the weight.

At one token, a layer's small launches cost as much as its arithmetic. Several of them would only
turn the same weight into the same factors again.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_ATTRIBUTE = "_vlm_serve_derived"


def derived(
    weight: torch.Tensor, name: str, build: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return `build(weight)`, cached under `name` until the weight is written to or collected.

    Args:
        weight: any tensor; the result is kept as an attribute of this object.
        name: one per kind of result.
        build: a pure function of the weight.
    """
    version = -1 if weight.is_inference() else weight._version
    kept: dict[str, tuple[int, torch.Tensor]] = weight.__dict__.setdefault(_ATTRIBUTE, {})
    entry = kept.get(name)
    if entry is not None and entry[0] == version:
        return entry[1]
    result = build(weight)
    kept[name] = (version, result)
    return result
