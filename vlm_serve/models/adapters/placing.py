"""Matches an adapter's modules with a model's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from blake3 import blake3

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.models.adapters.changes import (
    LowRank,
    Modules,
    changes_of,
    is_vision,
    kind_of,
    module_of,
    shared,
)
from vlm_serve.models.adapters.folder import AdapterFile, split
from vlm_serve.options.declared import format_size
from vlm_serve.preprocess.identity.keys import tagged

_DOMAIN = b"vlm-serve adapter 1"
_LISTED = 8


@dataclass(frozen=True)
class Adapter:
    """An adapter beside the model that it was placed for.

    Attributes:
        modules: its factors, by the model's names of modules.
        changes: of the model's projections.
    """

    modules: Mapping[str, LowRank]
    changes: AdapterChanges

    @cached_property
    def digest(self) -> str:
        """64 hexadecimal digits that name everything that decides bits; not the adapter's name."""
        return _digest(self.modules)

    @cached_property
    def vision_digest(self) -> str:
        """The same of the vision tower's modules; "" if it leaves them alone."""
        tower = {name: change for name, change in self.modules.items() if is_vision(name)}
        return _digest(tower) if tower else ""

    @property
    def nbytes(self) -> int:
        """Bytes of its factors, of which the modules of an expert may share one."""
        factors = (
            factor for change in self.modules.values() for factor in (change.down, change.up)
        )
        return sum({factor.data_ptr(): factor.nbytes for factor in factors}.values())

    @property
    def layout_bytes(self) -> int:
        """Bytes of its factors in the layout of compiled code, about."""
        return sum(change.layout_bytes for change in self.modules.values())


def place(file: AdapterFile, modules: Modules, experts: Collection[str] = ()) -> Adapter:
    """Match an adapter's modules with a model's.

    Args:
        file: the adapter.
        modules: of the model.
        experts: projections of routed experts that adapters may change: gate_up_proj, down_proj.

    Raises:
        CheckpointError: the model lacks modules, which the message lists, or has them in another
            size.
    """
    named: dict[str, LowRank] = {}
    for name, change in file.modules.items():
        module = module_of(name)
        if module in named:
            raise CheckpointError(f"the adapter has {module} twice")
        named[module] = change
    for name, fused in file.experts.items():
        split_changes = split(module_of(name), fused, modules.experts)
        if named.keys() & split_changes.keys():
            raise CheckpointError(f"the adapter has experts of {name} twice")
        named |= split_changes
    sizes = modules.sizes | modules.experts
    unknown = sorted(name for name in named if name not in sizes)
    if unknown:
        raise CheckpointError(_complaint(unknown, modules))
    _check_experts(named, modules, experts)
    for name, change in named.items():
        out, depth = sizes[name]
        if (change.up.shape[0], change.down.shape[1]) != (out, depth):
            raise CheckpointError(
                f"the adapter is of another model: {name} takes {change.down.shape[1]} numbers to "
                f"{change.up.shape[0]}, the model's takes {depth} to {out}"
            )
    changes = changes_of(named, modules)
    return Adapter(shared(named, modules, changes), changes)


def _complaint(unknown: list[str], modules: Modules) -> str:
    shown = ", ".join(unknown[:_LISTED]) + (", ..." if len(unknown) > _LISTED else "")
    known = ", ".join(dict.fromkeys(_kinds(modules.sizes | modules.experts)))
    return (
        f"the model has no such modules, {len(unknown)} of the adapter's: {shown}; it has {known}"
    )


def _kinds(names: Iterable[str]) -> Iterable[str]:
    """Yield modules' names without the numbers of layers."""
    for name in names:
        yield ".".join(part if not part.isdigit() else "*" for part in name.split("."))


def _check_experts(
    named: Mapping[str, LowRank], modules: Modules, allowed: Collection[str]
) -> None:
    """Check that options allow the adapter's changes of routed experts."""
    changed = {kind_of(name) for name in named if name in modules.experts}
    if changed <= set(allowed):
        return
    wanted = changed | set(allowed)
    option = "all" if len(wanted) > 1 else next(iter(wanted))
    size = format_size(
        sum(change.layout_bytes for name, change in named.items() if ".experts." in name)
    )
    raise CheckpointError(
        f"the adapter changes routed experts, in {size} of memory: --lora-experts {option} "
        "allows it"
    )


def _digest(modules: Mapping[str, LowRank]) -> str:
    whole = blake3(tagged("domain", _DOMAIN))
    for name in sorted(modules):
        change = modules[name]
        whole.update(tagged("module", name) + tagged("scale", float(change.scale).hex()))
        for tag, factor in ("down", change.down), ("up", change.up):
            raw = factor.contiguous().view(torch.uint8).numpy()
            whole.update(tagged(tag, f"{factor.dtype} {list(factor.shape)}"))
            whole.update(raw.tobytes())
    return whole.hexdigest()
