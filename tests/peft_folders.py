"""Random adapters in PEFT's form, and transformers with one of them, unmerged in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import oracle
import torch
from safetensors.torch import save_file

STRENGTH = 0.3
"""Size of random factors: small enough for a stable model, large enough to change every token."""


def linears(path: Path) -> dict[str, tuple[int, int]]:
    """(out, in) of every `Linear` that transformers' model of a checkpoint has, by name."""
    found = oracle.model(path).named_modules()
    kinds = (torch.nn.Linear,)
    return {name: tuple(each.weight.shape) for name, each in found if isinstance(each, kinds)}  # type: ignore[misc]


def random_factors(
    sizes: Mapping[str, tuple[int, int]], seed: int, *, rank: int = 4, ranks: Mapping[str, int] = {}
) -> dict[str, torch.Tensor]:
    """Tensors of an adapter for some modules, by the names under which PEFT saves them."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (out, depth) in sizes.items():
        own = next((r for end, r in ranks.items() if name.endswith(end)), rank)
        for kind, shape in ("A", (own, depth)), ("B", (out, own)):
            key = f"base_model.model.{name}.lora_{kind}.weight"
            tensors[key] = torch.randn(shape, generator=draw) * STRENGTH / shape[1] ** 0.5
    return tensors


def write_adapter(
    folder: Path, tensors: Mapping[str, torch.Tensor], rank: int = 4, **fields: Any
) -> Path:
    """Save an adapter as PEFT does; `fields` go into adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    save_file(
        {name: each.contiguous() for name, each in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


def random_adapter(
    checkpoint: Path, folder: Path, seed: int, *, only: Sequence[str] = (), rank: int = 4
) -> Path:
    """Save a random adapter of all a model's Linears, or of those whose names have a given part."""
    sizes = {
        name: size
        for name, size in linears(checkpoint).items()
        if not only or any(part in name for part in only)
    }
    return write_adapter(folder, random_factors(sizes, seed, rank=rank), rank)


@contextmanager
def adapted(checkpoint: Path, folder: Path, scales: Mapping[str, float]) -> Iterator[None]:
    """Let transformers' model of a checkpoint compute with an adapter, unmerged: as PEFT does.

    Args:
        checkpoint: of the model.
        folder: of the adapter.
        scales: factors by ends of modules' names; "" for all others.
    """
    from safetensors.torch import load_file

    tensors = load_file(folder / "adapter_model.safetensors")
    modules = dict(oracle.model(checkpoint).named_modules())
    hooks = []
    for key, down in tensors.items():
        if ".lora_A." not in key:
            continue
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if name.removesuffix(".base_layer").endswith(".experts"):
            continue  # `adapted_experts` changes them
        up = tensors[key.replace(".lora_A.", ".lora_B.")]
        scale = next(each for end, each in scales.items() if name.endswith(end))

        def add(
            _: Any, inputs: Any, output: Any, down: Any = down, up: Any = up, scale: float = scale
        ) -> Any:
            return output + inputs[0] @ down.T @ up.T * scale

        hooks.append(modules[name].register_forward_hook(add))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def fused_experts(checkpoint: Path) -> dict[str, tuple[int, ...]]:
    """Shapes `[experts, out, in]` of the tensors of routed experts in transformers' model."""
    found = oracle.model(checkpoint).named_parameters()
    return {name: tuple(each.shape) for name, each in found if each.ndim == 3 and "exper" in name}


def random_expert_factors(
    shapes: Mapping[str, tuple[int, ...]], seed: int, rank: int, *, alone: bool = False
) -> dict[str, torch.Tensor]:
    """Factors of such tensors by the names under which PEFT saves them. The first tensor of a
    module is the inner one, unless it is `alone`."""
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (count, rows, columns) in shapes.items():
        module, _, kind = name.rpartition(".")
        inner = ".base_layer" if kind == "gate_up_proj" and not alone else ""
        for part, shape in ("A", (count * rank, rows)), ("B", (columns, rank * count)):
            key = f"base_model.model.{module}{inner}.lora_{part}.weight"
            tensors[key] = torch.randn(shape, generator=draw) * STRENGTH / shape[1] ** 0.25
    return tensors


@contextmanager
def adapted_experts(
    checkpoint: Path,
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    scale: float,
    *,
    turned: bool = False,
) -> Iterator[None]:
    """Let transformers' model compute with changed experts, by the formula of PEFT's
    `ParamWrapper.get_delta_weight`; `turned`: as since 0.19, for modules not `is_transposed`."""
    before = {}
    parameters = dict(oracle.model(checkpoint).named_parameters())
    both = any(".base_layer." in each for each in tensors)
    for name in fused_experts(checkpoint):
        module, _, kind = name.rpartition(".")
        inner = ".base_layer" if kind == "gate_up_proj" and both else ""
        key = f"base_model.model.{module}{inner}.lora_A.weight"
        if key not in tensors:
            continue
        a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
        count = len(a) // rank
        change = torch.einsum(
            f"ore,eri->{'eoi' if turned else 'eio'}",
            b.reshape(len(b), rank, count),
            a.reshape(count, rank, -1),
        )
        before[name] = parameters[name].data
        parameters[name].data = before[name] + scale * change
    try:
        yield
    finally:
        for name, data in before.items():
            parameters[name].data = data
