"""Quantised weights as described by a checkpoint's config.json: the format of each tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.models.patterns import patterns_of_one_file
from vlm_serve.models.quantization.base import GROUPS, Format, Names, Tensors
from vlm_serve.models.quantization.compressed import groups_of
from vlm_serve.models.quantization.fields import (
    PLAIN,
    Fields,
    Rule,
    described,
    expression,
    of_auto_round,
    of_keys,
    rule,
)
from vlm_serve.models.quantization.float8 import Float8
from vlm_serve.models.quantization.gguf import type_rules
from vlm_serve.models.quantization.integers import Awq, Gptq
from vlm_serve.models.quantization.modelopt import modelopt_rules

_PLAIN_BITS = 16
"""From this width on a module of auto-round is dense."""
_PACKINGS = ("auto_round:auto_gptq", "auto_round:auto_awq")
_PLACES = ("quantization_config", "compression_config", "quantization")
_USUALLY_DENSE = re.compile(
    r"(.*\.)?(visual|embed_tokens|lm_head|conv1d|gate|shared_expert_gate|in_proj_(a|b|ba))(\..*)?"
)
"""Modules that are dense in published checkpoints, whether their lists include them or not."""


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
                found = section.get(place) if isinstance(section, Mapping) else None
                if found:
                    return _read(Fields(found, place))
        return None

    def format_of(self, weight: str) -> Format | None:
        """Return a weight's format by config.json; None if it is dense there."""
        module = Names(weight).module
        return next((each.format for each in self.rules if each.fits(module)), self.default)

    def expected(self, weight: str) -> Format | None:
        """Return a weight's most likely format, without looking at its tensors."""
        module = Names(weight).module
        named = any(each.format and each.names and each.fits(module) for each in self.rules)
        usual = _USUALLY_DENSE.fullmatch(module) and not named
        return None if usual else self.format_of(weight)

    def found(self, weight: str, tensors: Tensors) -> Format | None:
        """Return a weight's format in a checkpoint; None if it is stored dense, whatever the config
        says.

        Raises:
            CheckpointError: it is stored quantised although the config calls it dense.
        """
        format_, names = self.format_of(weight), Names(weight)
        if format_ is not None:
            return format_ if format_.holds(tensors, names) else None
        known = [each.format for each in self.rules if each.format is not None]
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
        formats = [self.default, *(each.format for each in self.rules)]
        return any(each is not None and not isinstance(each, Float8) for each in formats)

    def __str__(self) -> str:
        """Return its description for tables."""
        return f"{self.method}; {self.activations}"


def _read(fields: Fields) -> QuantScheme:
    method = fields.get("quant_method")
    if method is None and "quant_algo" in fields:  # as older exports of ModelOpt
        method = "modelopt"
    elif method is None and "config_groups" in fields:
        method = "compressed-tensors"
    if not isinstance(method, str) or method not in _METHODS:
        mlx = method is None and "bits" in fields and "method" not in fields
        raise CheckpointError(
            f"quant_method {method!r} in {fields.place} is not supported; supported are "
            f"{', '.join(_METHODS)}: {_INSTEAD.get('mlx' if mlx else str(method), PLAIN)}"
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
        if not numbers or not all(isinstance(each, int) and each > 0 for each in size):
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
    fields.expect(form, "gptq", "gptq_v2")
    default = _gptq_format(fields, offset=0 if fields.get(form) == "gptq_v2" else 1)
    wanted = of_auto_round(fields)
    rules = []
    for pattern, changes in fields.section("dynamic").items():
        text = pattern.removeprefix("+:").removeprefix("-:")
        changed = None
        if not pattern.startswith("-:"):
            own = fields.changed(changes, f"dynamic {pattern!r} of {fields.place}")
            changed = _gptq_format(own, offset=default.offset)
            own.finish("gptq")
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
    fields.expect(fields.agreed("version", "format", "checkpoint_format"), "gemm", "GEMM")
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
            f"{' and '.join(map(repr, _PACKINGS))}: export the model in one of these"
        )

    def read(own: Fields) -> Format:
        return _gptq_format(own, offset=1) if tensors == "gptq" else _awq_format(own)

    rules, wanted = [], of_auto_round(fields)
    for name, content in fields.section("extra_config").items():
        own = fields.changed(content, f"{name!r} of extra_config in {fields.place}")
        format_ = None if _is_dense(own) else read(own)
        wanted += of_auto_round(own)
        own.finish("auto-round")
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


def _compressed(fields: Fields) -> QuantScheme:
    rules, wanted = groups_of(fields)
    return QuantScheme("compressed-tensors", described(wanted), rules, None)


def _modelopt(fields: Fields) -> QuantScheme:
    rules, default, wanted = modelopt_rules(fields)
    return QuantScheme("modelopt", described(wanted), rules, default, lists_err=True)


def _gguf(fields: Fields) -> QuantScheme:
    rules = type_rules(fields.section("types"))
    fields.finish("gguf")
    return QuantScheme("gguf", described([]), rules, None)


_METHODS: dict[str, Callable[[Fields], QuantScheme]] = {
    "fp8": _float8,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "auto-round": _auto_round,
    "gguf": _gguf,
}

_INSTEAD = {
    "mlx": f"bits and group_size without a method are MLX's, whose weights are not read; {PLAIN}",
    "bitsandbytes": f"its nf4 and int8 weights are made from plain ones at loading; {PLAIN}",
    "torchao": f"its weights are Python objects; {PLAIN}, or an export as compressed-tensors",
    "quark": f"{PLAIN}, or an export as compressed-tensors",
}
"""The way out by method."""

METHODS = tuple(_METHODS)
"""Supported values of `quant_method`."""
