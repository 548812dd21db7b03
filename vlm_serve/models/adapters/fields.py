"""adapter_config.json of PEFT: rank and scale of every module, and what is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from vlm_serve.errors import CheckpointError
from vlm_serve.models.patterns import Pattern, patterns_of_one_file

_Value = TypeVar("_Value", int, float)

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 256
_PATTERN_SECONDS = 5.0
"""Processor time for patterns. A request to load an adapter must not outlast a server's end."""

_HARMLESS = frozenset(
    [
        "alpha_pattern",
        "arrow_config",
        "auto_mapping",
        "base_model_name_or_path",
        "bias",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "lora_ga_config",
        "megatron_config",
        "megatron_core",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "target_parameters",
        "task_type",
        "use_rslora",
    ]
)
"""Fields that are read below, or that matter to training alone."""
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "modules saved whole (modules_to_save)",
    "fan_in_fan_out": "transposed weights (fan_in_fan_out)",
    "arrow_config": "a router of adapters (arrow_config)",
    "alora_invocation_tokens": "activation by tokens (alora_invocation_tokens)",
    "trainable_token_indices": "tuned embeddings of tokens (trainable_token_indices)",
    "layer_replication": "repeated layers (layer_replication)",
    "lora_bias": "biases (lora_bias)",
    "use_qalora": "QALoRA",
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the base model's weights: the adapter then fits no other base."""


@dataclass(frozen=True, slots=True)
class AdapterFields:
    """Ranks and scales of an adapter.

    Attributes:
        rank, alpha: of modules that no pattern names.
        ranks, alphas: by patterns of modules' names, or of their ends.
        root: whether the scale is alpha over the root of the rank (rslora), not over the rank.
        parameters: ends of names of tensors changed as such (`target_parameters`).
    """

    rank: int
    alpha: float
    ranks: Sequence[tuple[Pattern, int]]
    alphas: Sequence[tuple[Pattern, float]]
    root: bool
    parameters: tuple[str, ...] = ()

    def rank_of(self, module: str) -> int:
        """Return the file's rank of a module."""
        return int(_matching(self.ranks, module, self.rank))

    def scale_of(self, module: str, rank: int) -> float:
        """Return the factor of a module's product."""
        alpha = _matching(self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.root else alpha / rank


def read_fields(raw: Mapping[str, Any]) -> AdapterFields:
    """Read the content of adapter_config.json.

    Raises:
        CheckpointError: it describes no LoRA, has a value of a wrong type, or asks for what is not
            supported; the message names the field.
    """
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{CONFIG_FILE}: peft_type is {kind!r}: only LORA is supported")
    for name, what in _REFUSED.items():
        if raw.get(name):
            raise CheckpointError(f"{CONFIG_FILE}: {what}: not supported")
    if raw.get("bias", "none") != "none":
        raise CheckpointError(f"{CONFIG_FILE}: tuned biases (bias {raw['bias']!r}): not supported")
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{CONFIG_FILE}: init_lora_weights {start!r} changes the base model's weights: save "
            "the adapter with path_initial_model_for_weight_conversion"
        )
    for name, value in raw.items():
        if name not in _HARMLESS and name not in _REFUSED and value:
            raise CheckpointError(f"{CONFIG_FILE}: {name} is set, and is not supported")
    with patterns_of_one_file(_PATTERN_SECONDS):
        ranks = _by_pattern(raw, "rank_pattern", _rank)
        alphas = _by_pattern(raw, "alpha_pattern", _number)
    return AdapterFields(
        rank=_rank("r", raw.get("r", 8)),
        alpha=_number("lora_alpha", raw.get("lora_alpha", 8)),
        ranks=ranks,
        alphas=alphas,
        root=raw.get("use_rslora") is True,
        parameters=_names(raw, "target_parameters"),
    )


def _by_pattern(
    raw: Mapping[str, Any], name: str, read: Callable[[str, Any], _Value]
) -> list[tuple[Pattern, _Value]]:
    """Return a table's values by patterns that fit a name or, behind a dot, its end (PEFT's
    `get_pattern_key`)."""
    found = raw.get(name) or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{CONFIG_FILE}: {name} is no table")
    place = f"{CONFIG_FILE}: {name}"
    return [
        (Pattern(key, place, r"(.*\.)?(", ")$"), read(name, each)) for key, each in found.items()
    ]


def _names(raw: Mapping[str, Any], name: str) -> tuple[str, ...]:
    found = raw.get(name) or []
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise CheckpointError(f"{CONFIG_FILE}: {name} is no list of names")
    return tuple(found)


def _rank(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise CheckpointError(f"{CONFIG_FILE}: {name} {value!r} is no rank from 1 to {MAX_RANK}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"{CONFIG_FILE}: {name} {value!r} is no number")
    return float(value)


def _matching(patterns: Sequence[tuple[Pattern, float]], module: str, otherwise: float) -> float:
    """Return the value of the first pattern that fits a module."""
    return next((value for pattern, value in patterns if pattern.match(module)), otherwise)
