"""The groups of compressed-tensors' configuration: modules, and the storage of their weights."""

from __future__ import annotations

from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.models.quantization.base import GROUPS, Format
from vlm_serve.models.quantization.fields import Fields
from vlm_serve.models.quantization.float4 import Float4, Mxfp4, Nvfp4
from vlm_serve.models.quantization.float8 import MXFP8_BLOCK, Float8
from vlm_serve.models.quantization.packed import Packed
from vlm_serve.models.quantization.rules import Rule, expression, rule

_ANY = "Linear"
"""The class name of every projection."""
_EXPRESSION = "re:"
_INTEGERS = ("pack-quantized", "int-quantized")
_FLOATS = ("float-quantized", "naive-quantized")
_MXFP8 = "mxfp8-quantized"
_FLOATS4: dict[str, Float4] = {
    "nvfp4-pack-quantized": Nvfp4(),
    "mxfp4-pack-quantized": Mxfp4(),
}


def groups_of(fields: Fields) -> tuple[tuple[Rule, ...], str | None]:
    """Return rules in order of precedence, and the wanted activations, if any.

    Raises:
        CheckpointError: as from `QuantScheme.of`.
    """
    if fields.section("sparsity_config").get("format", "dense") != "dense":
        raise CheckpointError("sparsity_config in quantization_config is not supported")
    fields.expect("quantization_status", "compressed", "frozen")
    whole = fields.raw.get("format")
    kept = fields.names("ignore")
    rules = [rule([each for each in kept if not each.startswith(_EXPRESSION)], None)]
    rules += [_rule(each, None) for each in kept if each.startswith(_EXPRESSION)]
    found: list[tuple[str, Format | None]] = []
    said: list[str] = []
    for name, content in fields.section("config_groups").items():
        group = Fields(content, f"{name} of quantization_config")
        format_ = _format(group, str(group.raw.get("format") or whole))
        found += [(target, format_) for target in group.names("targets")]
        said += _said(group.raw.get("input_activations"))
    if not found:
        raise CheckpointError("quantization_config has no config_groups with targets")
    # Precedence: names, then expressions, then the class of all projections.
    ordered = sorted(found, key=lambda each: (each[0] == _ANY, each[0].startswith(_EXPRESSION)))
    rules += [_rule(target, format_) for target, format_ in ordered]
    if fields.raw.get("kv_cache_scheme"):
        said.append("8-bit keys and values")
    return tuple(rules), "; ".join(dict.fromkeys(said)) or None


def _rule(target: str, format_: Format | None) -> Rule:
    if target == _ANY:
        return Rule(format_, expressions=(expression(""),))
    if target.startswith(_EXPRESSION):
        return Rule(format_, expressions=(expression(target.removeprefix(_EXPRESSION)),))
    return rule([target], format_)


def _format(group: Fields, stored: str) -> Format | None:
    if group.raw.get("weights") is None:
        return None
    weights = Fields(group.raw["weights"], f"weights of {group.place}")
    kind, bits = weights.raw.get("type", "int"), weights.raw.get("num_bits")
    strategy = weights.raw.get("strategy") or ("group" if weights.raw.get("group_size") else None)
    if kind == "float" and bits == 8:
        weights.expect("symmetric", True)
        if stored == _MXFP8:
            weights.expect("group_size", MXFP8_BLOCK[1])
            return Float8(MXFP8_BLOCK, exponents=True)
        group.expect("format", *_FLOATS, _MXFP8)
        if stored not in _FLOATS:
            _refuse(group, stored, kind, bits)
        return Float8(_block(weights, strategy))
    if kind == "float" and bits == 4 and stored in _FLOATS4:
        weights.expect("symmetric", True)
        weights.expect("group_size", _FLOATS4[stored].group)
        return _FLOATS4[stored]
    if kind != "int" or stored not in _INTEGERS:
        _refuse(group, stored, kind, bits)
    plain = stored == "int-quantized"
    weights.expect("actorder", False, "weight", "static")
    size = -1
    if strategy == "group":
        size = weights.number("group_size", -1, *GROUPS)
    elif strategy not in ("channel", "tensor"):
        raise CheckpointError(
            f"strategy {strategy!r} in {weights.place} is not supported for integers, only "
            "'group', 'channel' or 'tensor'"
        )
    return Packed(
        bits=weights.number("num_bits", *((8,) if plain else (4, 8))),
        group=size,
        symmetric=weights.switch("symmetric", default=True),
        plain=plain,
    )


def _block(weights: Fields, strategy: object) -> tuple[int, int] | None:
    if strategy in ("channel", "tensor"):
        return None
    if strategy != "block":
        raise CheckpointError(
            f"strategy {strategy!r} in {weights.place} is not supported for FP8, only 'channel', "
            "'tensor' or 'block'"
        )
    size = weights.raw.get("block_structure")
    fits = isinstance(size, list) and len(size) == 2
    if not fits or not all(isinstance(each, int) and each > 0 for each in size or ()):
        raise CheckpointError(f"block_structure in {weights.place} must be two sizes, not {size!r}")
    assert isinstance(size, list)
    return int(size[0]), int(size[1])


def _refuse(group: Fields, stored: str, kind: object, bits: object) -> None:
    known = ", ".join((*_INTEGERS, *_FLOATS, _MXFP8, *_FLOATS4))
    raise CheckpointError(
        f"{group.place} stores {bits}-bit {kind} weights as {stored!r}, which is not supported; "
        f"supported are int4, int8, FP8 and FP4 in {known}"
    )


def _said(activations: Any) -> list[str]:
    """Return a group's wanted activations as text."""
    if activations is None:
        return []
    fields = Fields(activations, "input_activations")
    kind = "FP" if fields.raw.get("type") == "float" else "int"
    dynamic = "dynamic" if fields.raw.get("dynamic") else "static input_scale"
    return [f"{dynamic}, in {kind}{fields.raw.get('num_bits', 8)}"]
