"""The groups of compressed-tensors' configuration: modules, and the storage of their weights."""

from __future__ import annotations

from vlm_serve.errors import CheckpointError
from vlm_serve.models.quantization.base import GROUPS, Format
from vlm_serve.models.quantization.fields import (
    PLAIN,
    Fields,
    Rule,
    expression,
    of_group,
    of_keys,
    rule,
)
from vlm_serve.models.quantization.float4 import Float4, Mxfp4, Nvfp4
from vlm_serve.models.quantization.float8 import MXFP8_BLOCK, Float8
from vlm_serve.models.quantization.integers import Packed

_ANY = "Linear"
"""The class name of every projection."""
_EXPRESSION = "re:"
_SECTION = "compressed-tensors"
_LOCATIONS = ("weight_input", "weight_output")
"""Where a transform may be applied: the stored weights have it already."""
_PACKED = "pack-quantized"
_BYTES = ("int-quantized", "naive-quantized")
_FLOATS = ("float-quantized", "naive-quantized")
_MXFP8 = "mxfp8-quantized"
_FLOATS4: dict[str, Float4] = {
    "nvfp4-pack-quantized": Nvfp4(),
    "mxfp4-pack-quantized": Mxfp4(),
}


def groups_of(fields: Fields) -> tuple[tuple[Rule, ...], list[str]]:
    """Return rules in order of precedence, and the wanted activations.

    Raises:
        CheckpointError: as from `QuantScheme.of`.
    """
    sparsity = fields.part("sparsity_config")
    sparsity.expect("format", "dense")
    sparsity.finish(f"{_SECTION}: sparsity_config")
    _check_transforms(fields.part("transform_config"))
    fields.expect("quantization_status", "compressed", "frozen")
    whole = fields.get("format")
    kept = fields.names("ignore")
    rules = [rule([each for each in kept if not each.startswith(_EXPRESSION)], None)]
    rules += [_rule(each, None) for each in kept if each.startswith(_EXPRESSION)]
    found: list[tuple[str, Format | None]] = []
    wanted: list[str] = []
    for name, content in fields.section("config_groups").items():
        group = Fields(content, f"{name} of quantization_config")
        format_ = _format(group, str(group.get("format") or whole))
        found += [(target, format_) for target in group.names("targets")]
        wanted += of_group(group)
        group.finish(f"{_SECTION}: config_groups")
    if not found:
        raise CheckpointError("quantization_config has no config_groups with targets")
    # Precedence: names, then expressions, then the class of all projections.
    ordered = sorted(found, key=lambda each: (each[0] == _ANY, each[0].startswith(_EXPRESSION)))
    rules += [_rule(target, format_) for target, format_ in ordered]
    wanted += of_keys(fields, "kv_cache_scheme")
    fields.finish(_SECTION)
    return tuple(rules), wanted


def _check_transforms(fields: Fields) -> None:
    """Refuse transforms of activations. Those of weights are already in the stored weights."""
    place = f"{_SECTION}: transform_config"
    for name, content in fields.section("config_groups").items():
        group = Fields(content, f"{name} of config_groups of {fields.place}")
        applied = group.get("apply") or []
        if not isinstance(applied, list):
            raise CheckpointError(f"apply in {group.place} must be a list, not {applied!r}")
        for index, each in enumerate(applied):
            apply = Fields(each, f"apply[{index}] of {group.place}")
            location = apply.get("location")
            if location not in _LOCATIONS:
                raise CheckpointError(
                    f"location {location!r} in {apply.place} asks for a transform of activations, "
                    f"which is not supported, only {' or '.join(map(repr, _LOCATIONS))}; {PLAIN}"
                )
            apply.finish(f"{place}.config_groups.apply")
        group.finish(f"{place}.config_groups")
    fields.finish(place)


def _rule(target: str, format_: Format | None) -> Rule:
    if target == _ANY:
        return Rule(format_, expressions=(expression(""),))
    if target.startswith(_EXPRESSION):
        return Rule(format_, expressions=(expression(target.removeprefix(_EXPRESSION)),))
    return rule([target], format_)


def _format(group: Fields, stored: str) -> Format | None:
    if group.get("weights") is None:
        return None
    weights = group.part("weights")
    format_ = _format_of(group, weights, stored)
    weights.finish(f"{_SECTION}: weights")
    return format_


def _format_of(group: Fields, weights: Fields, stored: str) -> Format:
    kind, bits = weights.get("type", "int"), weights.get("num_bits")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else None)
    weights.expect("actorder", False, "weight", "static")
    weights.expect("dynamic", False)
    if kind == "float" and bits == 8:
        weights.expect("symmetric", True)
        if stored == _MXFP8:
            weights.expect("strategy", "group")
            weights.expect("group_size", MXFP8_BLOCK[1])
            return Float8(MXFP8_BLOCK, exponents=True)
        group.expect("format", *_FLOATS, _MXFP8)
        if stored not in _FLOATS:
            raise _refusal(group, stored, kind, bits)
        block = _block(weights, strategy)
        weights.expect("group_size", -1)
        return Float8(block)
    if kind == "float" and bits == 4 and stored in _FLOATS4:
        weights.expect("symmetric", True)
        weights.expect("strategy", "tensor_group", "group")
        weights.expect("group_size", _FLOATS4[stored].group)
        return _FLOATS4[stored]
    plain = stored in _BYTES
    if kind != "int" or not (plain or stored == _PACKED) or (plain and bits != 8):
        raise _refusal(group, stored, kind, bits)
    size = -1
    if strategy == "group":
        size = weights.number("group_size", -1, *GROUPS)
    elif strategy not in ("channel", "tensor"):
        raise CheckpointError(
            f"strategy {strategy!r} in {weights.place} is not supported for integers, only "
            "'group', 'channel' or 'tensor'"
        )
    else:
        weights.expect("group_size", -1)
    return Packed(
        bits=weights.number("num_bits", 4, 8),
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
    size = weights.get("block_structure")
    fits = isinstance(size, list) and len(size) == 2
    if not fits or not all(isinstance(each, int) and each > 0 for each in size or ()):
        raise CheckpointError(f"block_structure in {weights.place} must be two sizes, not {size!r}")
    assert isinstance(size, list)
    return int(size[0]), int(size[1])


def _refusal(group: Fields, stored: str, kind: object, bits: object) -> CheckpointError:
    fp4 = " or ".join(_FLOATS4)
    return CheckpointError(
        f"{group.place} stores {bits}-bit {kind} weights as {stored!r}, which is not supported; "
        f"supported are int4 and int8 in {_PACKED}, int8 in {' or '.join(_BYTES)}, FP8 in "
        f"{' or '.join(_FLOATS)} or {_MXFP8}, and FP4 in {fp4}"
    )
