"""Quantised weights as described by a checkpoint's config.json: the format of each tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.models.patterns import patterns_of_one_file
from vlm_serve.models.quantization.base import GROUPS, Format, Names, Tensors
from vlm_serve.models.quantization.fields import (
    PLAIN,
    Fields,
    Rule,
    described,
    expression,
    of_auto_round,
    of_group,
    of_keys,
    rule,
    wildcard,
)
from vlm_serve.models.quantization.float4 import MODELOPT_NVFP4, MXFP4, NVFP4, Float4
from vlm_serve.models.quantization.float8 import MXFP8_BLOCK, Float8
from vlm_serve.models.quantization.gguf import type_rules
from vlm_serve.models.quantization.integers import Awq, Gptq, Packed

_PLAIN_BITS = 16
"""From this width on a module of auto-round is dense."""
_PACKINGS = ("auto_round:auto_gptq", "auto_round:auto_awq")
_PLACES = ("quantization_config", "compression_config", "quantization")
_USUALLY_DENSE = re.compile(
    r"(.*\.)?(visual|embed_tokens|lm_head|score|conv1d|gate|router|shared_expert_gate|in_proj_(a|b|ba))(\..*)?"
)
"""Modules that are dense in published checkpoints, whether their lists include them or not."""


_ANY = "Linear"
"""The class name of every projection."""
_EXPRESSION = "re:"
_COMPRESSED = "compressed-tensors"
_LOCATIONS = ("weight_input", "weight_output")
"""Where a transform may be applied: the stored weights have it already."""
_PACKED = "pack-quantized"
_BYTES = ("int-quantized", "naive-quantized")
_FLOATS = ("float-quantized", "naive-quantized")
_MXFP8 = "mxfp8-quantized"
_FLOATS4: dict[str, Float4] = {
    "nvfp4-pack-quantized": NVFP4,
    "mxfp4-pack-quantized": MXFP4,
}
_MODELOPT = "modelopt"
_MIXED = "MIXED_PRECISION"
_BLOCK = (128, 128)
_STATIC = "static input_scale, in FP"
_MODELOPT_FORMATS: Mapping[str, tuple[Format, str | None]] = {
    "NVFP4": (MODELOPT_NVFP4, f"{_STATIC}4"),
    "W4A16_NVFP4": (MODELOPT_NVFP4, None),
    "FP8": (Float8(None), f"{_STATIC}8"),
    "FP8_PER_CHANNEL_PER_TOKEN": (Float8(None), "dynamic, in FP8"),
    "FP8_PB_WO": (Float8(_BLOCK), None),
    "FP8_BLOCK_SCALES": (Float8(_BLOCK), "dynamic, in FP8"),
    "MXFP8": (Float8(MXFP8_BLOCK, exponents=True), "dynamic, in FP8"),
}
"""By name: storage of weights, and wanted activations."""


@dataclass(frozen=True, slots=True)
class QuantScheme:
    """The quantisation of a checkpoint's weights.

    Attributes:
        method: its name in config.json.
        activations: the wanted activations, as text.
        rules: in order; the first one that matches a module decides.
        default: the format of modules without a matching rule.
        lists_err: whether a weight stored quantised is accepted although the config calls it dense:
            ModelOpt's exports exclude heads that they quantise.
    """

    method: str
    activations: str
    rules: tuple[Rule, ...]
    default: Format | None
    lists_err: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> QuantScheme | None:
        """Return the scheme in the content of a config.json; None if nothing is quantised.

        Raises:
            CheckpointError: a method, a format or a field's value that is not supported.
        """
        for section in (config, config.get("text_config")):
            for place in _PLACES:
                content = section.get(place) if isinstance(section, Mapping) else None
                if content:
                    return _read(Fields(content, place))
        return None

    def format_of(self, weight: str) -> Format | None:
        """Return a weight's format by config.json; None if it is dense there."""
        module = Names(weight).module
        return next((rule.format for rule in self.rules if rule.fits(module)), self.default)

    def expected(self, weight: str) -> Format | None:
        """Return a weight's most likely format, without looking at its tensors."""
        module = Names(weight).module
        named = any(rule.format and rule.names and rule.fits(module) for rule in self.rules)
        usual = _USUALLY_DENSE.fullmatch(module) and not named
        return None if usual else self.format_of(weight)

    def stored_format(self, weight: str, tensors: Tensors) -> Format | None:
        """Return a weight's format in a checkpoint; None if it is stored dense, whatever the config
        says.

        Raises:
            CheckpointError: it is stored quantised although the config calls it dense.
        """
        format_, names = self.format_of(weight), Names(weight)
        if format_ is not None:
            return format_ if format_.holds(tensors, names) else None
        known = [rule.format for rule in self.rules if rule.format is not None]
        for other in [*known, *([self.default] if self.default else [])]:
            if other.holds(tensors, names):
                if self.lists_err:
                    return other
                raise CheckpointError(
                    f"{other.mark(names)} is quantised, but quantization_config leaves "
                    f"{names.module} as it is"
                )
        return None

    @property
    def integers(self) -> bool:
        """True if some weights are integers, or e2m1 numbers, which are multiples of one half."""
        formats = [self.default, *(rule.format for rule in self.rules)]
        return any(format_ is not None and not isinstance(format_, Float8) for format_ in formats)

    def __str__(self) -> str:
        """Return its description for tables."""
        return f"{self.method}; {self.activations}"


def _read(fields: Fields) -> QuantScheme:
    given = fields.get("quant_method")
    if given is None and "quant_algo" in fields:  # as older exports of ModelOpt
        given = _MODELOPT
    elif given is None and "config_groups" in fields:
        given = _COMPRESSED
    elif given is None:  # as GPTQModel's own files
        given = fields.get("method")
    method = _ALIASES.get(given, given) if isinstance(given, str) else None
    if method == "moe_wna16":  # vLLM's name for experts of either
        method = "awq" if "zero_point" in fields or "version" in fields else "gptq"
    if method not in _METHODS:
        mlx = given is None and ("bits" in fields or "mode" in fields)
        raise CheckpointError(
            f"quant_method {given!r} in {fields.place} is not supported; supported are "
            f"{', '.join(_METHODS)}: {_INSTEAD.get('mlx' if mlx else str(given), PLAIN)}"
        )
    with patterns_of_one_file():
        return _METHODS[method](fields)


def _float8(fields: Fields) -> QuantScheme:
    fields.expect("fmt", "e4m3", "float8_e4m3fn")
    fields.expect("scale_fmt", "float")
    fields.expect("activation_scheme", "dynamic", "static")
    # The format of experts alone: DeepSeek's are FP4.
    fields.expect("expert_dtype", "fp8")
    size = fields.get("weight_block_size")
    block = None
    if size is not None:
        numbers = isinstance(size, Sequence) and len(size) == 2
        if not numbers or not all(isinstance(number, int) and number > 0 for number in size):
            raise CheckpointError(
                f"weight_block_size in quantization_config must be two sizes, not {size!r}"
            )
        block = (int(size[0]), int(size[1]))
    static = fields.get("activation_scheme") == "static"
    wanted = ["static input_scale" if static else "dynamic, in FP8"]
    wanted += of_keys(fields, "kv_cache_scheme")
    kept = [*fields.names("modules_to_not_convert"), *fields.names("ignored_layers")]
    fields.finish("fp8")
    return QuantScheme(
        method="fp8",
        activations=described(wanted),
        rules=(rule(kept, None),),
        default=Float8(block),
    )


def _gptq(fields: Fields) -> QuantScheme:
    fields.expect("method", "gptq")
    form = fields.agreed("checkpoint_format", "format")
    # A file for Marlin's kernels that is not yet repacked has GPTQ's tensors, whose shapes tell.
    fields.expect(form, "gptq", "gptq_v2", "marlin")
    default = _gptq_format(fields, offset=0 if fields.get(form) == "gptq_v2" else 1)
    wanted = of_auto_round(fields)
    rules = []
    for pattern, changes in fields.section("dynamic").items():
        text = pattern.removeprefix("+:").removeprefix("-:")
        changed = None
        if not pattern.startswith("-:"):
            changed_fields = fields.changed(changes, f"dynamic {pattern!r} of {fields.place}")
            changed = _gptq_format(changed_fields, offset=default.offset)
            changed_fields.finish("gptq")
        rules.append(Rule(changed, expressions=(expression(text),)))
    fields.finish("gptq")
    return QuantScheme("gptq", described(wanted), tuple(rules), default)


def _gptq_format(fields: Fields, *, offset: int) -> Gptq:
    _check_words(fields)
    return Gptq(
        bits=fields.number("bits", 4, 8),
        group=fields.number("group_size", -1, *GROUPS),
        offset=offset,
        symmetric=fields.switch("sym", default=True),
        ordered=fields.switch("desc_act", default=False),
    )


def _check_words(fields: Fields) -> None:
    """Refuse codes that are no integers in words of 32 bits."""
    fields.expect("data_type", "int")
    fields.expect("pack_dtype", "int32")


def _awq(fields: Fields) -> QuantScheme:
    fields.expect("method", "awq")
    fields.expect(fields.agreed("version", "format", "checkpoint_format"), "gemm", "GEMM", "marlin")
    if fields.get("backend") == "llm-awq":
        raise CheckpointError(
            f"backend 'llm-awq' in {fields.place} names a layout that is not supported; {PLAIN}"
        )
    rules = (rule(fields.names("modules_to_not_convert"), None),)
    default, wanted = _awq_format(fields), of_auto_round(fields)
    fields.finish("awq")
    return QuantScheme("awq", described(wanted), rules, default)


def _awq_format(fields: Fields) -> Awq:
    # Whether there are zero points is told by the tensors, not by `zero_point` or `sym`.
    fields.get("sym")
    _check_words(fields)
    return Awq(
        fields.number(fields.agreed("bits", "w_bit"), 4, 8),
        fields.number(fields.agreed("group_size", "q_group_size"), -1, *GROUPS),
    )


def _auto_round(fields: Fields) -> QuantScheme:
    """Return the scheme of auto-round: the tensors are those of GPTQ or AWQ, and `extra_config`
    names the modules that differ."""
    # Files of before 2025 have the packing in `backend`, which later names a kernel.
    backend = str(fields.get("backend") or "auto").replace("autoround", "auto_round")
    packing = str(fields.get("packing_format") or (_PACKINGS[0] if ":" not in backend else backend))
    tensors = packing.removeprefix("auto_round:").removeprefix("auto_").partition(":")[0]
    if tensors not in ("gptq", "awq"):
        raise CheckpointError(
            f"packing_format {packing!r} in {fields.place} is not supported, only "
            f"{' and '.join(map(repr, _PACKINGS))}: export the model in one of these, or {PLAIN}"
        )

    def read(section: Fields) -> Format:
        return _gptq_format(section, offset=1) if tensors == "gptq" else _awq_format(section)

    rules, wanted = [], of_auto_round(fields)
    for name, content in fields.section("extra_config").items():
        changed = fields.changed(content, f"{name!r} of extra_config in {fields.place}")
        format_ = None if _is_dense(changed) else read(changed)
        wanted += of_auto_round(changed)
        changed.finish("auto-round")
        plain = rule([name], format_)
        # Names that are expressions match from anywhere in a module's name.
        rules.append(plain if plain.names else Rule(format_, expressions=(expression(name),)))
    default = read(fields)
    fields.finish("auto-round")
    return QuantScheme("auto-round", described(wanted), tuple(rules), default)


def _is_dense(fields: Fields) -> bool:
    """Return True if a module has no codes; their fields then mean nothing."""
    bits = fields.get("bits")
    dense = isinstance(bits, int) and bits >= _PLAIN_BITS
    if dense:
        for name in ("data_type", "group_size", "sym", "super_bits", "super_group_size"):
            fields.get(name)
    return dense


def _gguf(fields: Fields) -> QuantScheme:
    rules = type_rules(fields.section("types"))
    fields.finish("gguf")
    return QuantScheme("gguf", described([]), rules, None)


def _compressed(fields: Fields) -> QuantScheme:
    """Read compressed-tensors' groups: modules, and the storage of their weights."""
    sparsity = fields.part("sparsity_config")
    sparsity.expect("format", "dense")
    sparsity.finish(f"{_COMPRESSED}: sparsity_config")
    _check_transforms(fields.part("transform_config"))
    fields.expect("quantization_status", "compressed", "frozen")
    whole = fields.get("format")
    kept = fields.names("ignore")
    rules = [rule([entry for entry in kept if not entry.startswith(_EXPRESSION)], None)]
    rules += [_group_rule(entry, None) for entry in kept if entry.startswith(_EXPRESSION)]
    targets: list[tuple[str, Format | None]] = []
    wanted: list[str] = []
    for name, content in fields.section("config_groups").items():
        group = Fields(content, f"{name} of quantization_config")
        format_ = _group_format(group, str(group.get("format") or whole))
        targets += [(target, format_) for target in group.names("targets")]
        wanted += of_group(group)
        group.finish(f"{_COMPRESSED}: config_groups")
    if not targets:
        raise CheckpointError("quantization_config has no config_groups with targets")
    # Precedence: names, then expressions, then the class of all projections.
    ordered = sorted(
        targets, key=lambda target: (target[0] == _ANY, target[0].startswith(_EXPRESSION))
    )
    rules += [_group_rule(target, format_) for target, format_ in ordered]
    wanted += of_keys(fields, "kv_cache_scheme")
    fields.finish(_COMPRESSED)
    return QuantScheme(_COMPRESSED, described(wanted), tuple(rules), None)


def _check_transforms(fields: Fields) -> None:
    """Refuse transforms of activations. Those of weights are already in the stored weights."""
    place = f"{_COMPRESSED}: transform_config"
    for name, content in fields.section("config_groups").items():
        group = Fields(content, f"{name} of config_groups of {fields.place}")
        applied = group.get("apply") or []
        if not isinstance(applied, list):
            raise CheckpointError(f"apply in {group.place} must be a list, not {applied!r}")
        for index, entry in enumerate(applied):
            apply = Fields(entry, f"apply[{index}] of {group.place}")
            location = apply.get("location")
            if location not in _LOCATIONS:
                raise CheckpointError(
                    f"location {location!r} in {apply.place} asks for a transform of activations, "
                    f"which is not supported, only {' or '.join(map(repr, _LOCATIONS))}; {PLAIN}"
                )
            apply.finish(f"{place}.config_groups.apply")
        group.finish(f"{place}.config_groups")
    fields.finish(place)


def _group_rule(target: str, format_: Format | None) -> Rule:
    if target == _ANY:
        return Rule(format_, expressions=(expression(""),))
    if target.startswith(_EXPRESSION):
        return Rule(format_, expressions=(expression(target.removeprefix(_EXPRESSION)),))
    return rule([target], format_)


def _group_format(group: Fields, stored: str) -> Format | None:
    if group.get("weights") is None:
        return None
    weights = group.part("weights")
    format_ = _format_of(group, weights, stored)
    weights.finish(f"{_COMPRESSED}: weights")
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
            raise _group_refusal(group, stored, kind, bits)
        return Float8(_block(weights, strategy))
    if kind == "float" and bits == 4 and stored in _FLOATS4:
        weights.expect("symmetric", True)
        weights.expect("strategy", "tensor_group", "group")
        weights.expect("group_size", _FLOATS4[stored].group)
        return _FLOATS4[stored]
    plain = stored in _BYTES
    if kind != "int" or not (plain or stored == _PACKED) or (plain and bits != 8):
        raise _group_refusal(group, stored, kind, bits)
    size = -1
    if strategy == "group":
        size = weights.number("group_size", -1, *GROUPS)
    elif strategy not in ("channel", "tensor"):
        raise CheckpointError(
            f"strategy {strategy!r} in {weights.place} is not supported for integers, only "
            f"'group', 'channel' or 'tensor'; {PLAIN}"
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
    if strategy == "group":
        return 1, weights.number("group_size", *GROUPS)
    weights.expect("group_size", -1)
    if strategy in ("channel", "tensor"):
        return None
    if strategy != "block":
        raise CheckpointError(
            f"strategy {strategy!r} in {weights.place} is not supported for FP8, only 'channel', "
            f"'tensor', 'group' or 'block'; {PLAIN}"
        )
    size = weights.get("block_structure")
    fits = isinstance(size, list) and len(size) == 2
    if not fits or not all(isinstance(number, int) and number > 0 for number in size or ()):
        raise CheckpointError(f"block_structure in {weights.place} must be two sizes, not {size!r}")
    assert isinstance(size, list)
    return int(size[0]), int(size[1])


def _group_refusal(group: Fields, stored: str, kind: object, bits: object) -> CheckpointError:
    fp4 = " or ".join(_FLOATS4)
    return CheckpointError(
        f"{group.place} stores {bits}-bit {kind} weights as {stored!r}, which is not supported; "
        f"supported are int4 and int8 in {_PACKED}, int8 in {' or '.join(_BYTES)}, FP8 in "
        f"{' or '.join(_FLOATS)} or {_MXFP8}, and FP4 in {fp4}; {PLAIN}"
    )


def _modelopt(fields: Fields) -> QuantScheme:
    """Read ModelOpt's configuration: one format for all modules but some, or one for every module.

    It is in config.json or, in older exports, under `quantization` in a separate file.
    """
    if "quantization" in fields:
        inside = fields.part("quantization")
        fields.finish(_MODELOPT)
        fields = inside
    kept = [*fields.names("exclude_modules"), *fields.names("ignore")]
    rules, default = list(_modelopt_rules(kept, None)), None
    wanted: list[str | None] = []
    if _quant_algo(fields) == _MIXED:
        fields.expect("group_size", 16)
        by_format: dict[str, list[str]] = {}
        for module, content in fields.section("quantized_layers").items():
            section = Fields(content, f"{module} in quantized_layers of {fields.place}")
            by_format.setdefault(_modelopt_format(section), []).append(module)
            section.finish(f"{_MODELOPT}: quantized_layers")
        if not by_format:
            raise CheckpointError(f"{fields.place} has no quantized_layers")
        # A module's own format wins over a wildcard that excludes it.
        chosen = [_modelopt_layers(section, name) for name, section in by_format.items()]
        rules = [*chain.from_iterable(chosen), *rules]
        wanted = [_MODELOPT_FORMATS[name][1] for name in by_format]
    elif fields.get("quant_algo") is not None:
        # Without an algorithm only keys and values are quantised.
        default, activations = _MODELOPT_FORMATS[_modelopt_format(fields)]
        wanted.append(activations)
    wanted += of_keys(fields, "kv_cache_quant_algo", "kv_cache_scheme")
    _check_modelopt_groups(fields)
    fields.finish(_MODELOPT)
    told = described(field for field in wanted if field)
    return QuantScheme(_MODELOPT, told, tuple(rules), default, lists_err=True)


def _check_modelopt_groups(fields: Fields) -> None:
    """Refuse groups with more than `quant_algo` and `quantized_layers` say."""
    for name, content in fields.section("config_groups").items():
        group = Fields(content, f"{name} of {fields.place}")
        group.part("weights").finish(f"{_MODELOPT}: weights")
        of_group(group)
        group.finish(f"{_MODELOPT}: config_groups")


def _modelopt_layers(modules: list[str], name: str) -> Iterable[Rule]:
    """Yield a rule per module. The draft layer's names end in the words of the model's own, so all
    words must match."""
    for matching in _modelopt_rules(modules, _MODELOPT_FORMATS[name][0]):
        yield replace(matching, anchored=True)


def _modelopt_rules(modules: list[str], format_: Format | None) -> Iterable[Rule]:
    """Yield rules by names and wildcards."""
    yield rule([module for module in modules if "*" not in module], format_)
    for pattern in modules:
        if "*" in pattern:
            yield Rule(format_, expressions=(wildcard(pattern),))


def _modelopt_format(fields: Fields) -> str:
    name = _quant_algo(fields)
    if name not in _MODELOPT_FORMATS:
        raise CheckpointError(
            f"quant_algo {fields.get('quant_algo')!r} in {fields.place} is not supported, only "
            + f"{' or '.join(map(repr, _MODELOPT_FORMATS))}; {PLAIN}"
        )
    format_, size = _MODELOPT_FORMATS[name][0], fields.get("group_size")
    # Of FP8, a block has so many columns.
    only = format_.block[1] if isinstance(format_, Float8) and format_.block else None
    only = format_.group if isinstance(format_, Float4) else only
    if only is not None and size not in (None, only):
        raise CheckpointError(
            f"group_size {size!r} in {fields.place} is not supported, only {only}"
        )
    return name


def _quant_algo(fields: Fields) -> str:
    return str(fields.get("quant_algo")).upper()


_METHODS: dict[str, Callable[[Fields], QuantScheme]] = {
    "fp8": _float8,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "auto-round": _auto_round,
    "gguf": _gguf,
}

_ALIASES = {"intel/auto-round": "auto-round", "gptq_marlin": "gptq", "awq_marlin": "awq"}
_ALIASES |= dict.fromkeys(("modelopt_fp4", "modelopt_fp8", "modelopt_mixed"), _MODELOPT)
"""Other names of methods."""

_INSTEAD = {
    "mlx": f"bits and group_size without a method are MLX's, whose weights are not read; {PLAIN}",
    "bitsandbytes": f"its nf4 and int8 weights are made from plain ones at loading; {PLAIN}",
    "torchao": f"its weights are Python objects; {PLAIN}, or an export as compressed-tensors",
    "quark": f"{PLAIN}, or an export as compressed-tensors",
}
"""The way out by method."""

METHODS = tuple(_METHODS)
"""Supported values of `quant_method`."""
