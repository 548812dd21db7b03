"""Reads the fields of quantization_config.

Three kinds of fields need no format: those passed over, the quantisation of activations, keys and
values, which is reported and not followed, and the modules that an entry is about.
"""

from __future__ import annotations

import fnmatch
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vlm_serve.errors import CheckpointError
from vlm_serve.models.patterns import Pattern
from vlm_serve.models.quantization.base import Format

PLAIN = "serve the checkpoint that it was made from, with --quantization int8, int6 or int4"


def _names(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reason by field; the argument has lists of fields by reason."""
    return {name: reason for reason, names in reasons.items() for name in names.split()}


_SEARCH = "how the quantiser found scales and codes, which the file stores"
_WRITER = "who wrote the file"
_LOADING = "how another program loads or multiplies the weights"
_TENSORS = "the file's tensors show it, and their shapes and dtypes are checked"
_UNQUANTISED = "quantised activations, keys and values are reported and not followed"
_ACTIVATIONS = """act_group_size act_sym act_dynamic act_data_type static_kv_granularity
    static_attention_granularity"""
_INTEGERS = {
    # AutoRound writes its own fields into the configurations of GPTQ and AWQ too.
    _SEARCH: """act_group_aware activation_weighted_mse amp batch_size cache_block_outputs
        damp_auto_increment damp_percent dataset enable_alg_ext enable_minmax_tuning
        enable_norm_bias_tuning enable_quanted_input failsafe fallback foem gptaq
        gradient_accumulate_steps hessian hyb_act iters low_gpu_mem_usage lr max_input_length
        minmax_lr model_free model_seqlen mse n_samples nsamples pad_token_id seqlen static_groups
        tokenizer train_bs true_sequential""",
    _WRITER: "autoround_version meta model_file_base_name model_name_or_path",
    _LOADING: """disable_exllama do_fuse exllama_config fuse_max_seq_len modules_to_fuse
        use_cuda_fp16 use_exllama""",
    _TENSORS: """block_name_to_quantize ignore lm_head module_name_preceding_first_block
        modules_in_block_to_quantize quant_block_list scale_dtype supported_types
        to_quant_block_names""",
    _UNQUANTISED: _ACTIVATIONS,
}
PASSED_OVER: Mapping[str, Mapping[str, str]] = {
    "fp8": _names({_LOADING: "dequantize", _TENSORS: "modules_to_convert"}),
    "gptq": _names(
        {
            **_INTEGERS,
            _LOADING: f"{_INTEGERS[_LOADING]} backend",
            _TENSORS: f"{_INTEGERS[_TENSORS]} modules_to_not_convert",
        }
    ),
    "awq": _names({**_INTEGERS, _TENSORS: f"{_INTEGERS[_TENSORS]} zero_point"}),
    "auto-round": _names(_INTEGERS),
    "compressed-tensors": _names(
        {
            _WRITER: "global_compression_ratio version",
            _LOADING: "dequantize run_compressed use_optimized_inference",
        }
    ),
    "compressed-tensors: config_groups": {},
    "compressed-tensors: weights": _names(
        {_SEARCH: "observer observer_kwargs", _TENSORS: "scale_dtype zp_dtype"}
    ),
    "compressed-tensors: sparsity_config": _names(
        {
            "a format of `dense` stores zeros like other values": (
                "global_sparsity ignore registry_requires_subclass sparsity_structure targets"
            )
        }
    ),
    "compressed-tensors: transform_config": {},
    "compressed-tensors: transform_config.config_groups": _names(
        {
            "the stored weights are transformed already": (
                "head_dim precision randomize requires_grad type"
            )
        }
    ),
    "compressed-tensors: transform_config.config_groups.apply": _names(
        {"the stored weights are transformed already": "ignore inverse targets"}
    ),
    "modelopt": _names(
        {_WRITER: "producer", _UNQUANTISED: "kv_cache_quantized_layers kv_cache_schema_version"}
    ),
    "modelopt: quantized_layers": {},
    "modelopt: config_groups": _names({"`quant_algo` or `quantized_layers` decides": "targets"}),
    "modelopt: weights": _names(
        {
            "`quant_algo` or `quantized_layers` decides": (
                "dynamic group_size num_bits strategy symmetric type"
            )
        }
    ),
    # Of any format: input_activations, output_activations and kv_cache_scheme.
    "activations": _names(
        {
            _SEARCH: "observer observer_kwargs",
            _UNQUANTISED: (
                "actorder block_structure group_size scale_dtype strategy symmetric zp_dtype"
            ),
        }
    ),
    "gguf": {},
}
"""The reason by section of a configuration and field. `Fields.finish` refuses every other unread
field. A field may be passed over only if no value of it changes the meaning of the file's
tensors."""
REFUSED: Mapping[str, str] = _names(
    {
        "it asks for an operation on activations": (
            "hadamard_config pre_quant_scale rotation rotation_config spinquant_config "
            "transform_config"
        ),
        "it adds a low-rank product to the weights": "adapter lora_rank",
        "scales are quantised too": "super_bits super_group_size super_sym",
        "its tensors have another layout": "is_marlin_format",
        "layers have different numbers of experts": "moe_sparsity_config",
    }
)
"""The reason by field of any section, for the message; any other unknown field is refused too."""
_SECTION = "activations"
_PLAIN_BITS = 16
"""From this width on activations are as they are."""
_FRONT = r"(?:model\.|language_model\.)"
_PREFIX = re.compile(rf"^{_FRONT}+")
"""Prefixes of module names that depend on the file's writer."""
_NAME = re.compile(r"[\w.-]+")


class Fields:
    """An object in quantization_config, or all of it.

    It remembers the fields that were read; `finish` refuses the others.

    Args:
        content: of the file.
        place: for messages.

    Raises:
        CheckpointError: from every method; names the field.
    """

    def __init__(self, content: object, place: str = "quantization_config") -> None:
        if not isinstance(content, Mapping):
            raise CheckpointError(f"{place} in config.json must be an object, not {content!r}")
        self._content: Mapping[str, Any] = content
        self._read: set[str] = set()
        self.place = place

    def __contains__(self, name: str) -> bool:
        return name in self._content

    def get(self, name: str, default: object = None) -> Any:
        """Return a field's value, whatever it is."""
        self._read.add(name)
        return self._content.get(name, default)

    def number(self, name: str, *known: int) -> int:
        """Return a required whole number out of the supported ones."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value not in known:
            self._refuse(name, value, known)
        assert isinstance(value, int)
        return value

    def switch(self, name: str, *, default: bool) -> bool:
        """Return a boolean."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{name} in {self.place} must be true or false, not {value!r}")
        return value

    def expect(self, name: str, *known: object) -> None:
        """Refuse a value outside the supported ones, if the field is present."""
        value = self.get(name)
        if value is not None and value not in known:
            self._refuse(name, value, known)

    def names(self, name: str) -> list[str]:
        """Return a list of names, empty if it is absent."""
        value = self.get(name) or []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise CheckpointError(f"{name} in {self.place} must be a list of names, not {value!r}")
        return value

    def section(self, name: str) -> Mapping[str, Any]:
        """Return an object whose keys are names of modules or groups, empty if it is absent."""
        return self.part(name)._content

    def part(self, name: str) -> Fields:
        """Return the fields of an object inside, none if it is absent."""
        return Fields(self.get(name) or {}, f"{name} of {self.place}")

    def changed(self, content: object, place: str) -> Fields:
        """Return the fields of some modules: these, with changes.

        Fields without a change need not be read before `finish`.
        """
        changes = Fields(content, place)._content
        result = Fields({**self._content, **changes}, place)
        result._read.update(
            name
            for name, value in self._content.items()
            if name not in changes or changes[name] == value
        )
        return result

    def agreed(self, *names: str) -> str:
        """Return the first present of several names of one field; the first if all are absent.

        Raises:
            CheckpointError: the field is present under two names with different values.
        """
        values = {name: self.get(name) for name in names}
        present = [name for name in names if values[name] is not None]
        for name in present[1:]:
            if str(values[name]).lower() != str(values[present[0]]).lower():
                raise CheckpointError(
                    f"{present[0]} {values[present[0]]!r} and {name} {values[name]!r} in "
                    f"{self.place} contradict each other"
                )
        return (present or [*names])[0]

    def finish(self, section: str) -> None:
        """Refuse unread fields.

        Those of PASSED_OVER may stay, and values asking for nothing: null, false, or empty.

        Args:
            section: a key of PASSED_OVER.
        """
        for name, value in self._content.items():
            nothing = value is None or value is False or value in ("", [], {})
            if not (nothing or name in self._read or name in PASSED_OVER[section]):
                reason = REFUSED.get(name, "it may change what the weights mean")
                raise CheckpointError(
                    f"{name} {reprlib.repr(value)} in {self.place} is not supported: {reason}; "
                    f"{PLAIN}"
                )

    def _refuse(self, name: str, value: object, known: tuple[object, ...]) -> None:
        named = " or ".join(repr(option) for option in known)
        raise CheckpointError(
            f"{name} {value!r} in {self.place} is not supported, only {named}; {PLAIN}"
        )


def described(wanted: Iterable[str]) -> str:
    """Return the wanted quantisation as text for tables."""
    joined = "; ".join(dict.fromkeys(wanted))
    if not joined:
        return "made for activations as they are"
    return f"made for quantised activations ({joined}), which is not followed"


def of_group(group: Fields) -> list[str]:
    """Return the wanted quantisation of inputs and outputs in a group of config_groups."""
    wanted = []
    for name, prefix in (("input_activations", ""), ("output_activations", "outputs ")):
        if group.get(name) is not None:
            fields = group.part(name)
            kind = "FP" if fields.get("type") == "float" else "int"
            dynamic = "dynamic" if fields.get("dynamic") else "static input_scale"
            scales = "" if prefix else f"{dynamic}, "
            wanted.append(f"{prefix}{scales}in {kind}{fields.get('num_bits', 8)}")
            fields.finish(_SECTION)
    return wanted


def of_keys(fields: Fields, *names: str) -> list[str]:
    """Return the wanted quantisation of keys and values.

    Args:
        fields: with objects, or names of types.
        names: of fields about keys and values.
    """
    wanted = []
    for name in names:
        value, bits = fields.get(name), 8
        if isinstance(value, dict) and value:
            scheme = fields.part(name)
            bits = scheme.get("num_bits", 8)
            for known in ("type", "dynamic"):
                scheme.get(known)
            scheme.finish(_SECTION)
        if value:
            wanted.append(f"{bits}-bit keys and values")
    return wanted


def of_auto_round(fields: Fields) -> list[str]:
    """Return the wanted quantisation in AutoRound's fields, also as GPTQ or AWQ."""
    bits, wanted = fields.get("act_bits"), []
    if isinstance(bits, int) and bits < _PLAIN_BITS:
        kind = str(fields.get("act_data_type") or "int")
        wanted.append(f"in {bits} bits, {kind}")
    return wanted + of_keys(fields, "static_kv_dtype", "static_attention_dtype")


@dataclass(frozen=True, slots=True)
class Rule:
    """The format of some modules; None for dense ones.

    Attributes:
        names: whole names, or consecutive words of them: `mlp.gate` is in `layers.0.mlp.gate` and
            not in `layers.0.mlp.gate_proj`, and `visual` is in all modules below it.
        expressions: matched from a name's beginning.
        anchored: whether a name's words must be the first ones, as for a module and all below it.
    """

    format: Format | None
    names: frozenset[str] = frozenset()
    expressions: tuple[Pattern, ...] = ()
    anchored: bool = False

    def fits(self, module: str) -> bool:
        """Return True if it matches a module."""
        runs = _runs(plain_name(module), only_first=self.anchored)
        if self.names and not self.names.isdisjoint(runs):
            return True
        return any(pattern.match(module) for pattern in self.expressions)


def rule(entries: Iterable[str], format_: Format | None) -> Rule:
    """Return a rule by names; entries that cannot be names are expressions.

    Raises:
        CheckpointError: an entry is neither.
    """
    entries = list(entries)
    names = frozenset(plain_name(entry) or entry for entry in entries if _NAME.fullmatch(entry))
    odd = [entry for entry in entries if not _NAME.fullmatch(entry)]
    return Rule(format_, names, tuple(expression(entry, "(?:", r")(?:\.|$)") for entry in odd))


def expression(text: str, before: str = "", behind: str = "") -> Pattern:
    """Return a regular expression of a configuration, with expressions around it.

    Raises CheckpointError.
    """
    return Pattern(text, "quantization_config", before, behind)


def wildcard(text: str) -> Pattern:
    """Return the expression for whole names in which stars match any number of words.

    Raises CheckpointError.
    """
    return expression(f"{_FRONT}*{fnmatch.translate(plain_name(text))}")


def plain_name(name: str) -> str:
    """Return a name without the prefixes that depend on the file's writer."""
    return _PREFIX.sub("", name)


def _runs(module: str, *, only_first: bool) -> Iterator[str]:
    words = module.split(".")
    for first in range(1 if only_first else len(words)):
        for last in range(first + 1, len(words) + 1):
            yield ".".join(words[first:last])
