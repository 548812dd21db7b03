"""A folder with an adapter, as PEFT saves it: adapter_config.json and one file of safetensors.

adapter_config.json has the rank and scale of every module; what it asks for beyond is refused by
name.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.kernels.linear.packed import PANEL
from vlm_serve.models.adapters.changes import DOWN, GATE_UP, LowRank
from vlm_serve.models.adapters.gguf import gguf_factors
from vlm_serve.models.files import SafetensorsFile, fetched_adapter
from vlm_serve.models.patterns import Pattern, patterns_of_one_file

WEIGHTS_FILE = "adapter_model.safetensors"
_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
_KINDS = {
    "lora_embedding_": "a tuned table of embeddings",
    "lora_magnitude_vector": "DoRA's magnitudes",
    "modules_to_save": "a module saved whole",
    ".bias": "a tuned bias",
}
"""Parts of tensors' names of adapters that are refused, and what they are."""
_BASE = (".base_layer.weight", ".base_layer.bias", "embed_tokens.weight", "lm_head.weight")
"""Ends of names of the model's own tensors. PEFT saves them with a changed `lm_head`."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


_Value = TypeVar("_Value", int, float)
CONFIG_FILE = "adapter_config.json"
FILES = (
    *(CONFIG_FILE, WEIGHTS_FILE, "adapter_model.bin"),
    *("tokenizer.json", "tokenizer_config.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
)
"""All files of a folder that are looked at, here and in `compatibility`."""
MAX_RANK = 256
_MAX_NAME = 4096
_SHOWN = 60
_LARGEST = torch.finfo(torch.float32).max
_PATTERN_SECONDS = 5.0
"""Processor time for patterns. A request to load an adapter must not outlast a server's end."""
_HARMLESS = frozenset(
    (
        *("alpha_pattern", "arrow_config", "auto_mapping", "base_model_name_or_path", "bias"),
        *("corda_config", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode"),
        *("init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config"),
        *("lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core"),
        *("modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern"),
        *("revision", "runtime_config", "target_modules", "target_parameters", "task_type"),
        *("use_rslora",),
    )
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
_MERGE = (
    "; merge it into its model and serve that: "
    "base = AutoModelForImageTextToText.from_pretrained(BASE, dtype='auto'); "
    "PeftModel.from_pretrained(base, ADAPTER).merge_and_unload().save_pretrained(FOLDER); "
    "AutoProcessor.from_pretrained(BASE).save_pretrained(FOLDER)"
)
"""What helps with an adapter that is refused, with transformers and PEFT."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that change the base model's weights: the adapter then fits no other base."""
_INNER = ".base_layer"
_SWAPS = re.compile(r"0\.(19|[2-9]\d)\b|[1-9]")
"""Versions of PEFT from 0.19 on; those before 0.18 wrote none."""


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """The change of all experts' weights in one tensor (`target_parameters`).

    PEFT's `ParamWrapper` takes a tensor `[experts, o, i]`. A `[experts * rank, i]` lists the ranks
    of one expert after the other; B `[o, rank * experts]` the experts of one rank after the other.
    An expert's change is its B @ A. Before 0.19 PEFT took the tensor as `[experts, i, o]`, and the
    change was the transpose. A module with two changed tensors is wrapped twice: the first tensor's
    factors are named by `base_layer`.

    Attributes:
        a, b: PEFT's factors.
        rank: of each expert.
        scale: alpha over the rank, or over its root.
        turned: whether the change of a square weight is the transpose; other shapes tell.
    """

    a: torch.Tensor
    b: torch.Tensor
    rank: int
    scale: float
    turned: bool = False

    @property
    def count(self) -> int:
        """Number of experts."""
        return self.a.shape[0] // self.rank

    @property
    def nbytes(self) -> int:
        """Bytes of both factors."""
        return self.a.nbytes + self.b.nbytes

    @property
    def layout_bytes(self) -> int:
        """Bytes of both factors as compiled code takes them, at most."""
        panels = -(-self.rank // PANEL) * PANEL * self.a.itemsize
        wide = max(self.a.shape[1], self.b.shape[0])
        return self.count * (2 * panels + 4 * self.rank) * wide

    def of(self, expert: int, out: int, depth: int) -> LowRank | None:
        """Return an expert's change of its weight `[out, depth]`; None for a tensor of another
        shape."""
        a = self.a[expert * self.rank : (expert + 1) * self.rank]
        b = self.b.view(len(self.b), self.rank, self.count)[:, :, expert]
        sizes = (len(b), a.shape[1])
        if sizes == (out, depth) and not (self.turned and out == depth):
            return LowRank(a.contiguous(), b.contiguous(), self.scale)
        if sizes == (depth, out):
            return LowRank(b.T.contiguous(), a.T.contiguous(), self.scale)
        return None


@dataclass(frozen=True, slots=True)
class AdapterFields:
    """Ranks and scales of an adapter.

    Attributes:
        rank, alpha: of modules that no pattern names.
        ranks, alphas: by patterns of modules' names, or of their ends.
        root: whether the scale is alpha over the root of the rank (rslora), not over the rank.
        parameters: ends of names of tensors changed as such (`target_parameters`).
        turned: see `FusedExperts`.
    """

    rank: int
    alpha: float
    ranks: Sequence[tuple[Pattern, int]]
    alphas: Sequence[tuple[Pattern, float]]
    root: bool
    parameters: tuple[str, ...] = ()
    turned: bool = False

    def rank_of(self, module: str) -> int:
        """Return the file's rank of a module."""
        return int(_matching(self.ranks, module, self.rank))

    def scale_of(self, module: str, rank: int) -> float:
        """Return the factor of a module's product."""
        alpha = _matching(self.alphas, module, self.alpha)
        return alpha / math.sqrt(rank) if self.root else alpha / rank


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """A folder's content.

    Attributes:
        path: the folder.
        modules: by the names of modules in the file, without PEFT's prefix.
        experts: of routed experts in one tensor, by the names of those tensors.
        base: names of tensors that must be the model's own, see `check_base`.
    """

    path: Path
    modules: Mapping[str, LowRank]
    experts: Mapping[str, FusedExperts]
    base: Sequence[str] = ()

    @property
    def max_rank(self) -> int:
        """The largest rank of its modules."""
        return max(change.rank for change in self._changes)

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        return sum(change.nbytes for change in self._changes)

    @property
    def layout_bytes(self) -> int:
        """Bytes of all factors as compiled code takes them, about."""
        return sum(change.layout_bytes for change in self._changes)

    @property
    def _changes(self) -> list[LowRank | FusedExperts]:
        return [*self.modules.values(), *self.experts.values()]


def find_adapter(name: str | Path) -> Path:
    """Return the folder of an adapter: a directory, or a hub id, which is downloaded.

    Raises:
        ModelNotFoundError: there is neither.
        CheckpointError: the folder has no adapter.
    """
    path = Path(name)
    if not path.is_dir():
        path = fetched_adapter(str(name))
    if not (path / CONFIG_FILE).is_file():
        raise CheckpointError(f"the folder has no {CONFIG_FILE}: it holds no adapter of PEFT")
    return path


def read_adapter(name: str | Path, dtype: torch.dtype | None = None) -> AdapterFile:
    """Read an adapter.

    Args:
        name: directory, hub id, or a GGUF file.
        dtype: to convert the factors to; None: as stored.

    Raises:
        ModelNotFoundError: neither a directory nor a hub id that can be fetched.
        CheckpointError: a file is missing or cut, a tensor is unknown, has another rank than
            adapter_config.json states, or values that are no numbers; or something is not
            supported.
    """
    if Path(name).is_file():
        return _of_gguf(Path(name), dtype)
    path = find_adapter(name)
    fields = _read_fields(_json(path / CONFIG_FILE))
    weights = path / WEIGHTS_FILE
    if not weights.is_file():
        old = " (adapter_model.bin is a pickle: save it anew with safe_serialization)"
        hint = old if (path / "adapter_model.bin").is_file() else ""
        raise CheckpointError(f"the folder has no {WEIGHTS_FILE}{hint}{_MERGE if hint else ''}")
    file = SafetensorsFile(weights)
    base = [name for name in sorted(file.names()) if _is_base(name)]
    factors = _factors(file, set(file.names()) - set(base), dtype)
    together = {name: pair for name, pair in factors.items() if _is_fused(name)}
    apart = {
        name: _pair(name, pair, fields) for name, pair in factors.items() if not _is_fused(name)
    }
    return AdapterFile(path, apart, fused(together, fields), base)


def _of_gguf(path: Path, dtype: torch.dtype | None) -> AdapterFile:
    factors, alpha = gguf_factors(path)
    modules = {}
    for name, pair in factors.items():
        checked = {kind: _checked(f"lora_{kind} of {name}", pair[kind], dtype) for kind in "AB"}
        rank = len(checked["A"])
        modules[name] = _pair(name, checked, AdapterFields(rank, alpha or rank, (), (), root=False))
    return AdapterFile(path, modules, {})


def _json(path: Path) -> Mapping[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} cannot be read") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path.name} is no table")
    return content


def _unique(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a table of JSON. Of a name that comes twice, nobody knows which value was meant."""
    table = dict(fields)
    if len(table) != len(fields):
        twice = Counter(name for name, _ in fields).most_common(1)[0][0]
        raise CheckpointError(f"{CONFIG_FILE} has {shown(twice)} twice")
    return table


def shown(value: Any) -> str:
    """Return a value of a file for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _is_base(name: str) -> bool:
    changed = any(part in name for part in (".lora_", "modules_to_save"))
    return name.endswith(_BASE) and not changed


def _factors(
    file: SafetensorsFile, names: Iterable[str], dtype: torch.dtype | None
) -> dict[str, dict[str, torch.Tensor]]:
    """Return A and B of every module."""
    factors: dict[str, dict[str, torch.Tensor]] = {}
    for name in sorted(names):
        if len(name) > _MAX_NAME:
            raise CheckpointError(f"{shown(name)} is too long for the name of a tensor")
        match = _NAME.fullmatch(name)
        if match is None:
            kind = next((label for part, label in _KINDS.items() if part in name), None)
            why = f"{kind or 'no tensor of LoRA'}: not supported{_MERGE if kind else ''}"
            raise CheckpointError(f"{name} is {why}")
        pair = factors.setdefault(match[1], {})
        if match[2] in pair:
            raise CheckpointError(
                f"{WEIGHTS_FILE} has lora_{match[2]}.weight of {match[1]} twice: with the prefix "
                "base_model.model, or .default, and without"
            )
        pair[match[2]] = _checked(name, file.tensor(name), dtype)
    if not factors:
        raise CheckpointError(f"{WEIGHTS_FILE} holds no tensors")
    for module, pair in factors.items():
        for kind in "AB":
            if kind not in pair:
                raise CheckpointError(f"{module} has no lora_{kind}.weight")
    return factors


def _checked(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    if tensor.dtype not in _FLOATS:
        raise CheckpointError(f"{name} is {tensor.dtype}, which is not supported")
    if tensor.ndim < 2 or not tensor.numel():
        raise CheckpointError(f"{name} has the shape {list(tensor.shape)}, expected two dimensions")
    # Kernels of convolutions: one number per input, and per output.
    flat = tensor.flatten(1).to(dtype or tensor.dtype).contiguous()
    if not all(math.isfinite(float(bound)) for bound in torch.aminmax(flat)):
        raise CheckpointError(f"{name} holds values that are NaN or infinite")
    return flat


def _pair(module: str, pair: Mapping[str, torch.Tensor], fields: AdapterFields) -> LowRank:
    down, up, stated = pair["A"], pair["B"], fields.rank_of(module)
    if down.shape[0] != stated or up.shape[1] != stated:
        raise CheckpointError(
            f"{module} has rank {down.shape[0]} in lora_A and {up.shape[1]} in lora_B, but "
            f"{CONFIG_FILE} says {stated}"
        )
    scale = fields.scale_of(module, stated)
    _check_scaled(module, down, up, scale)
    return LowRank(down, up, scale)


def _check_scaled(module: str, down: torch.Tensor, up: torch.Tensor, scale: float) -> None:
    """Raise CheckpointError if a product of a module's factors and its scale is beyond float32."""
    size = abs(scale)
    for factor in (down, up):
        size *= max(abs(float(bound)) for bound in torch.aminmax(factor))
    if not size <= _LARGEST:
        raise CheckpointError(f"{module} with its scale {scale:g} is too large for float32")


def _read_fields(raw: Mapping[str, Any]) -> AdapterFields:
    """Read the content of adapter_config.json.

    Raises:
        CheckpointError: it describes no LoRA, has a value of a wrong type, or asks for what is not
            supported; the message names the field.
    """
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f"{CONFIG_FILE}: peft_type is {shown(kind)}: only LORA is supported{_help(kind)}"
        )
    for name, label in _REFUSED.items():
        if raw.get(name):
            raise CheckpointError(f"{CONFIG_FILE}: {label}: not supported{_help(name)}")
    if raw.get("bias", "none") != "none":
        raise CheckpointError(
            f"{CONFIG_FILE}: tuned biases (bias {shown(raw['bias'])}): not supported{_MERGE}"
        )
    start = raw.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{CONFIG_FILE}: init_lora_weights {shown(start)} changes the base model's weights: "
            f"save the adapter with path_initial_model_for_weight_conversion{_MERGE}"
        )
    for name, value in raw.items():
        if name not in _HARMLESS and name not in _REFUSED and value:
            raise CheckpointError(
                f"{CONFIG_FILE}: {name[:_SHOWN]} is set, and is not supported{_help(name)}"
            )
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
        turned=_SWAPS.match(str(raw.get("peft_version") or "")) is None,
    )


def _help(what: object) -> str:
    """Return what helps with an unsupported field or type of adapters; "" if nothing does, because
    it follows the prompt."""
    return "" if re.search(r"arrow|alora|PROMPT|TUNING|CPT|POLY|XLORA", str(what)) else _MERGE


def _by_pattern(
    raw: Mapping[str, Any], name: str, read: Callable[[str, Any], _Value]
) -> list[tuple[Pattern, _Value]]:
    """Return a table's values by patterns that fit a name or, behind a dot, its end (PEFT's
    `get_pattern_key`)."""
    table = raw.get(name) or {}
    if not isinstance(table, Mapping):
        raise CheckpointError(f"{CONFIG_FILE}: {name} is no table")
    place = f"{CONFIG_FILE}: {name}"
    return [
        (Pattern(key, place, r"(.*\.)?(", ")$"), read(name, value)) for key, value in table.items()
    ]


def _names(raw: Mapping[str, Any], name: str) -> tuple[str, ...]:
    names = raw.get(name) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"{CONFIG_FILE}: {name} is no list of names")
    return tuple(names)


def _rank(name: str, value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise CheckpointError(
            f"{CONFIG_FILE}: {name} {shown(value)} is no rank from 1 to {MAX_RANK}"
        )
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{CONFIG_FILE}: {name} {shown(value)} is no number")
    if not abs(value) <= _LARGEST:  # Neither is NaN, which is compared with nothing.
        raise CheckpointError(f"{CONFIG_FILE}: {name} {shown(value)} is no number of float32")
    return float(value)


def _matching(patterns: Sequence[tuple[Pattern, float]], module: str, otherwise: float) -> float:
    """Return the value of the first pattern that fits a module."""
    return next((value for pattern, value in patterns if pattern.match(module)), otherwise)


def _is_fused(module: str) -> bool:
    """Tell whether a module of an adapter's file holds all experts of a layer."""
    return module.removesuffix(_INNER).endswith(".experts")


def fused(
    factors: Mapping[str, Mapping[str, torch.Tensor]], fields: AdapterFields
) -> dict[str, FusedExperts]:
    """Name the tensors changed by factors of all experts.

    Raises:
        CheckpointError: adapter_config.json does not say which tensors, or states another rank.
    """
    changes = {}
    for module, pair in factors.items():
        experts = module.removesuffix(_INNER)
        wanted = [
            parameter
            for parameter in (GATE_UP, DOWN)
            if _targeted(f"{experts}.{parameter}", fields)
        ]
        wrapped = [wrapper for wrapper in (experts + _INNER, experts) if wrapper in factors]
        if len(wanted) != len(wrapped):
            raise CheckpointError(
                f"{experts} has factors for {len(wrapped)} tensors, but target_parameters of "
                f"{CONFIG_FILE} names {len(wanted)} of {GATE_UP} and {DOWN}"
            )
        name = f"{experts}.{wanted[wrapped.index(module)]}"
        rank = fields.rank_of(name)
        if len(pair["A"]) % rank or pair["B"].shape[1] != len(pair["A"]):
            raise CheckpointError(
                f"{name} has {len(pair['A'])} rows in lora_A and {pair['B'].shape[1]} columns in "
                f"lora_B, but {CONFIG_FILE} says rank {rank} for every expert"
            )
        scale = fields.scale_of(name, rank)
        _check_scaled(name, pair["A"], pair["B"], scale)
        changes[name] = FusedExperts(pair["A"], pair["B"], rank, scale, fields.turned)
    return changes


def _targeted(parameter: str, fields: AdapterFields) -> bool:
    return any(f".{parameter}".endswith(f".{target}") for target in fields.parameters)


def split(
    name: str, change: FusedExperts, sizes: Mapping[str, tuple[int, int]]
) -> dict[str, LowRank]:
    """Return the changes of every expert's own projections.

    Args:
        name: of the tensor.
        change: of all experts.
        sizes: (out, in) of the model's experts, by expert and projection.

    Raises:
        CheckpointError: the tensor is of another model.
    """
    experts, _, kind = name.rpartition(".")
    changes: dict[str, LowRank] = {}
    for expert in range(change.count):
        names = [f"{experts}.{expert}.{part}" for part in _parts(kind)]
        if any(projection not in sizes for projection in names):
            raise CheckpointError(f"the adapter is of another model: {name} has expert {expert}")
        (size, depth), parts = sizes[names[0]], len(names)
        whole = change.of(expert, parts * size, depth)
        if whole is None:
            raise CheckpointError(
                f"the adapter is of another model: an expert's {kind} has {change.a.shape[1]} x "
                f"{len(change.b)} numbers, the model's has {parts * size} x {depth}"
            )
        for place, part in enumerate(names):
            up = whole.up[place * size : (place + 1) * size]
            changes[part] = LowRank(whole.down, up, whole.scale)
    return changes


def _parts(kind: str) -> tuple[str, ...]:
    return ("gate_proj", "up_proj") if kind == GATE_UP else (DOWN,)
