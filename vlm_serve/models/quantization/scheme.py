"""Quantised weights as described by a checkpoint's config.json: the format of each tensor."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.models.patterns import share_budget
from vlm_serve.models.quantization.auto_round import auto_round_rules
from vlm_serve.models.quantization.awq import Awq
from vlm_serve.models.quantization.base import GROUPS, Format, Names, Tensors
from vlm_serve.models.quantization.compressed import groups_of
from vlm_serve.models.quantization.fields import Fields
from vlm_serve.models.quantization.float8 import Float8
from vlm_serve.models.quantization.gguf import type_rules
from vlm_serve.models.quantization.gptq import Gptq
from vlm_serve.models.quantization.modelopt import modelopt_rules
from vlm_serve.models.quantization.rules import Rule, expression, rule

_PLACES = ("quantization_config", "compression_config")
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
                    return _read(found)
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


def _read(found: object) -> QuantScheme:
    fields = Fields(found)
    method = fields.raw.get("quant_method")
    if method is None and "quant_algo" in fields.raw:  # as older exports of ModelOpt
        method = "modelopt"
    elif method is None and "config_groups" in fields.raw:
        method = "compressed-tensors"
    if not isinstance(method, str) or method not in _METHODS:
        raise CheckpointError(
            f"quant_method {method!r} in quantization_config is not supported; supported are "
            f"{', '.join(_METHODS)}: {_INSTEAD.get(str(method), _PLAIN)}"
        )
    scheme = _METHODS[method](fields)
    share_budget(each for own in scheme.rules for each in own.expressions)
    return scheme


def _float8(fields: Fields) -> QuantScheme:
    fields.expect("fmt", "e4m3", "float8_e4m3fn")
    fields.expect("scale_fmt", "float")
    fields.expect("activation_scheme", "dynamic", "static")
    size = fields.raw.get("weight_block_size")
    block = None
    if size is not None:
        numbers = isinstance(size, Sequence) and len(size) == 2
        if not numbers or not all(isinstance(each, int) and each > 0 for each in size):
            raise CheckpointError(
                f"weight_block_size in quantization_config must be two sizes, not {size!r}"
            )
        block = (int(size[0]), int(size[1]))
    static = fields.raw.get("activation_scheme") == "static"
    kept = fields.names("modules_to_not_convert") or fields.names("ignored_layers")
    return QuantScheme(
        method="fp8",
        activations=_activations("static input_scale" if static else "dynamic, in FP8"),
        rules=(rule(kept, None),),
        default=Float8(block),
    )


def _gptq(fields: Fields) -> QuantScheme:
    fields.expect("format", "gptq", "gptq_v2")
    fields.expect("checkpoint_format", "gptq", "gptq_v2")
    form = fields.raw.get("checkpoint_format") or fields.raw.get("format") or "gptq"
    default = _gptq_format(fields, offset=0 if form == "gptq_v2" else 1)
    rules = []
    for pattern, changes in fields.section("dynamic").items():
        text = pattern.removeprefix("+:").removeprefix("-:")
        changed = None
        if not pattern.startswith("-:"):
            if not isinstance(changes, Mapping):
                raise CheckpointError(
                    f"dynamic {pattern!r} in quantization_config must be an object"
                )
            changed = _gptq_format(Fields({**fields.raw, **changes}), offset=default.offset)
        rules.append(Rule(changed, expressions=(expression(text),)))
    return QuantScheme("gptq", _activations(None), tuple(rules), default)


def _gptq_format(fields: Fields, *, offset: int) -> Gptq:
    return Gptq(
        bits=fields.number("bits", 4, 8),
        group=fields.number("group_size", -1, *GROUPS),
        offset=offset,
        symmetric=fields.switch("sym", default=True),
    )


def _awq(fields: Fields) -> QuantScheme:
    fields.expect("version", "gemm", "GEMM")
    kept = fields.names("modules_to_not_convert")
    return QuantScheme("awq", _activations(None), (rule(kept, None),), _awq_format(fields))


def _awq_format(fields: Fields) -> Awq:
    # Whether there are zero points is told by the tensors, not by the field `zero_point`.
    return Awq(
        fields.number("bits" if "bits" in fields.raw else "w_bit", 4, 8),
        fields.number("group_size" if "group_size" in fields.raw else "q_group_size", -1, *GROUPS),
    )


def _auto_round(fields: Fields) -> QuantScheme:
    rules, default = auto_round_rules(fields, partial(_gptq_format, offset=1), _awq_format)
    return QuantScheme("auto-round", _activations(None), rules, default)


def _compressed(fields: Fields) -> QuantScheme:
    rules, activations = groups_of(fields)
    return QuantScheme("compressed-tensors", _activations(activations), rules, None)


def _modelopt(fields: Fields) -> QuantScheme:
    rules, default, activations = modelopt_rules(fields)
    return QuantScheme("modelopt", _activations(activations), rules, default, lists_err=True)


def _gguf(fields: Fields) -> QuantScheme:
    return QuantScheme("gguf", _activations(None), type_rules(fields.section("types")), None)


def _activations(wanted: str | None) -> str:
    """Return the checkpoint's wanted activations as text."""
    if wanted is None:
        return "made for activations as they are"
    return f"made for quantised activations ({wanted}), which is not followed"


_METHODS: dict[str, Callable[[Fields], QuantScheme]] = {
    "fp8": _float8,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "auto-round": _auto_round,
    "gguf": _gguf,
}

_PLAIN = "serve the checkpoint that it was made from, with --quantization int8, int6 or int4"
_INSTEAD = {
    "bitsandbytes": f"its nf4 and int8 weights are made from plain ones at loading; {_PLAIN}",
    "torchao": f"its weights are Python objects; {_PLAIN}, or an export as compressed-tensors",
    "quark": f"{_PLAIN}, or an export as compressed-tensors",
}
"""The way out by method."""

METHODS = tuple(_METHODS)
"""Supported values of `quant_method`."""
