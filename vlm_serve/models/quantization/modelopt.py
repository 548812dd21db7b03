"""ModelOpt's configuration: one format for all modules but some, or a format for every module.

It is in config.json or, in older exports, under `quantization` in a separate file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from vlm_serve.errors import CheckpointError
from vlm_serve.models.quantization.base import Format
from vlm_serve.models.quantization.fields import Fields, Rule, of_group, of_keys, rule, wildcard
from vlm_serve.models.quantization.float4 import Nvfp4
from vlm_serve.models.quantization.float8 import MXFP8_BLOCK, Float8

_SECTION = "modelopt"
_MIXED = "MIXED_PRECISION"
_BLOCK = (128, 128)
_STATIC = "static input_scale, in FP"
_FORMATS: Mapping[str, tuple[Format, str | None]] = {
    "NVFP4": (Nvfp4(modelopt=True), f"{_STATIC}4"),
    "W4A16_NVFP4": (Nvfp4(modelopt=True), None),
    "FP8": (Float8(None), f"{_STATIC}8"),
    "FP8_PER_CHANNEL_PER_TOKEN": (Float8(None), "dynamic, in FP8"),
    "FP8_PB_WO": (Float8(_BLOCK), None),
    "FP8_BLOCK_SCALES": (Float8(_BLOCK), "dynamic, in FP8"),
    "MXFP8": (Float8(MXFP8_BLOCK, exponents=True), "dynamic, in FP8"),
}
"""By name: storage of weights, and wanted activations."""


def modelopt_rules(fields: Fields) -> tuple[tuple[Rule, ...], Format | None, list[str]]:
    """Return rules in order of precedence, the format of all other modules, and the wanted
    activations.

    Raises:
        CheckpointError: as from `QuantScheme.of`.
    """
    if "quantization" in fields:
        inside = fields.part("quantization")
        fields.finish(_SECTION)
        fields = inside
    kept = [*fields.names("exclude_modules"), *fields.names("ignore")]
    rules, default = list(_rules(kept, None)), None
    wanted: list[str | None] = []
    if _name(fields) == _MIXED:
        by_format: dict[str, list[str]] = {}
        for module, content in fields.section("quantized_layers").items():
            own = Fields(content, f"{module} in quantized_layers of {fields.place}")
            by_format.setdefault(_known(own), []).append(module)
            own.finish(f"{_SECTION}: quantized_layers")
        if not by_format:
            raise CheckpointError(f"{fields.place} has no quantized_layers")
        # A module's own format wins over a wildcard that excludes it.
        rules = [each for name, own in by_format.items() for each in _layers(own, name)] + rules
        wanted = [_FORMATS[name][1] for name in by_format]
    elif fields.get("quant_algo") is not None:
        # Without an algorithm only keys and values are quantised.
        default, activations = _FORMATS[_known(fields)]
        wanted.append(activations)
    wanted += of_keys(fields, "kv_cache_quant_algo", "kv_cache_scheme")
    _check_groups(fields)
    fields.finish(_SECTION)
    return tuple(rules), default, [each for each in wanted if each]


def _check_groups(fields: Fields) -> None:
    """Refuse groups with more than `quant_algo` and `quantized_layers` say."""
    for name, content in fields.section("config_groups").items():
        group = Fields(content, f"{name} of {fields.place}")
        group.part("weights").finish(f"{_SECTION}: weights")
        of_group(group)
        group.finish(f"{_SECTION}: config_groups")


def _layers(modules: list[str], name: str) -> Iterable[Rule]:
    """Yield a rule per module. The draft layer's names end in the words of the model's own, so all
    words must match."""
    for each in _rules(modules, _FORMATS[name][0]):
        yield replace(each, anchored=True)


def _rules(modules: list[str], format_: Format | None) -> Iterable[Rule]:
    """Yield rules by names and wildcards."""
    yield rule([each for each in modules if "*" not in each], format_)
    for each in modules:
        if "*" in each:
            yield Rule(format_, expressions=(wildcard(each),))


def _known(fields: Fields) -> str:
    name = _name(fields)
    if name not in _FORMATS:
        raise CheckpointError(
            f"quant_algo {fields.get('quant_algo')!r} in {fields.place} is not supported, only "
            + " or ".join(map(repr, _FORMATS))
        )
    format_, size = _FORMATS[name][0], fields.get("group_size")
    # Of FP8, a block has so many columns.
    only = format_.block[1] if isinstance(format_, Float8) and format_.block else None
    only = 16 if isinstance(format_, Nvfp4) else only
    if only is not None and size not in (None, only):
        raise CheckpointError(
            f"group_size {size!r} in {fields.place} is not supported, only {only}"
        )
    return name


def _name(fields: Fields) -> str:
    return str(fields.get("quant_algo")).upper()
