"""Reads config.json: fields from the file, else from the family's table of transformers' defaults,
else from the configuration class itself."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from vlm_serve.errors import CheckpointError, ConfigError
from vlm_serve.system.foreign_files import foreign

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_LARGEST = (1 << 31) - 1
_MOST = {
    "num_hidden_layers": 4096,
    "depth": 4096,
    "mtp_num_hidden_layers": 4096,
    "num_experts": 16384,
    "num_local_experts": 16384,
    "n_routed_experts": 16384,
}
"""Of what lists are made of, many times more than any published model has."""

_SECTIONS = {"text_config": "TextConfig", "vision_config": "VisionConfig"}
"""Suffixes of the names of transformers' section classes, which share a prefix with the whole's."""

ROTATIONS = "rope_scaling", "rope_parameters"
"""Names of the object with a rotation's fields, the older one first."""

Defaults = Mapping[str, Mapping[str, Any]]


_WHOLE = ("quantization_config", "compression_config")
"""Objects read as a whole."""
_OF_PROMPTS = (
    "eos_token_id",
    "text_config.eos_token_id",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "vision_config.tokens_per_second",
    "position_id_per_seconds",
)
"""Fields that preparing prompts reads (`preprocess`)."""
_HEADS = "num_attention_heads, head_dim"
_KEYS = "num_key_value_heads, head_dim"
_VALUES = "linear_num_value_heads, linear_value_head_dim"
_CHANNELS = f"linear_num_key_heads, linear_key_head_dim, {_VALUES}"
_EXPERTS = "moe_intermediate_size"
_MAMBA_SIZES = "the sizes of mamba heads and groups"
_ADJUSTED = "intermediate_size, block_auto_adjust_ff_dim"
_SHARED = "shared_expert_intermediate_size"
_ALWAYS = "moe_shared_expert_intermediate_size"
_FIELDS = {
    r"(embed_tokens|lm_head)\.weight": ("vocab_size", "hidden_size"),
    r"self_attn\.q_proj\.\w+": (f"{_HEADS}, attn_output_gate", "hidden_size"),
    r"self_attn\.[kv]_proj\.\w+": (_KEYS, "hidden_size"),
    r"self_attn\.(o|out)_proj\.\w+": ("hidden_size", _HEADS),
    r"self_attn\.[qk]_(layer)?norm\.weight": ("head_dim",),
    r"conv\.(in|out)_proj\.\w+": ("hidden_size", "hidden_size"),
    r"(mamba|mixer)\.in_proj\.\w+": (_MAMBA_SIZES, "hidden_size"),
    r"(mamba|mixer)\.out_proj\.\w+": ("hidden_size", _MAMBA_SIZES),
    r"(mamba|mixer)\.conv1d\.weight": (_MAMBA_SIZES, "", "mamba_d_conv, conv_kernel"),
    r"(mamba|mixer)\.(conv1d\.bias|norm\.weight|A_log|D|dt_bias)": (_MAMBA_SIZES,),
    r"mixer\.q_proj\.weight": (_HEADS, "hidden_size"),
    r"mixer\.[kv]_proj\.weight": (_KEYS, "hidden_size"),
    r"mixer\.o_proj\.weight": ("hidden_size", _HEADS),
    r"shared_mlp\.input_linear\.weight": ("shared_intermediate_size", "hidden_size"),
    r"shared_mlp\.output_linear\.weight": ("hidden_size", "shared_intermediate_size"),
    r"block_sparse_moe\.experts\.\w+": (
        "num_local_experts",
        "intermediate_size, hidden_size",
        "intermediate_size, hidden_size",
    ),
    r"block_sparse_moe\.router\.\S+": ("num_local_experts", "hidden_size"),
    r"mixer\.gate\.\w+": ("n_routed_experts", "hidden_size"),
    r"mixer\.shared_experts\.up_proj\.weight": (_ALWAYS, "hidden_size"),
    r"mixer\.shared_experts\.down_proj\.weight": ("hidden_size", _ALWAYS),
    r"mixer\.up_proj\.weight": ("intermediate_size", "hidden_size"),
    r"mixer\.down_proj\.weight": ("hidden_size", "intermediate_size"),
    r"conv\.conv\.\w+": ("hidden_size", "", "conv_L_cache"),
    r"linear_attn\.in_proj_qkvz?\.weight": (_CHANNELS, "hidden_size"),
    r"linear_attn\.in_proj_z\.weight": (_VALUES, "hidden_size"),
    r"linear_attn\.in_proj_(a|b|ba)\.weight": ("linear_num_value_heads", "hidden_size"),
    r"linear_attn\.conv1d\.weight": (_CHANNELS, "", "linear_conv_kernel_dim"),
    r"linear_attn\.(A_log|dt_bias)": ("linear_num_value_heads",),
    r"linear_attn\.norm\.weight": ("linear_value_head_dim",),
    r"linear_attn\.out_proj\.weight": ("hidden_size", _VALUES),
    r"mlp\.gate\.weight": ("num_experts", "hidden_size"),
    r"experts\.gate_up_proj": (
        "num_experts",
        f"{_EXPERTS}, hidden_size",
        f"{_EXPERTS}, hidden_size",
    ),
    r"experts\.down_proj": ("num_experts", f"{_EXPERTS}, hidden_size", f"{_EXPERTS}, hidden_size"),
    r"experts\.\d+\.(gate|up)_proj\.weight": (_EXPERTS, "hidden_size"),
    r"experts\.\d+\.down_proj\.weight": ("hidden_size", _EXPERTS),
    r"shared_expert\.(gate|up)_proj\.weight": (_SHARED, "hidden_size"),
    r"shared_expert\.down_proj\.weight": ("hidden_size", _SHARED),
    r"mlp\.(gate|up)_proj\.weight": ("intermediate_size", "hidden_size"),
    r"mlp\.down_proj\.weight": ("hidden_size", "intermediate_size"),
    r"feed_forward\.w[13]\.weight": (_ADJUSTED, "hidden_size"),
    r"feed_forward\.w2\.weight": ("hidden_size", _ADJUSTED),
    r"patch_embed\.proj\.weight": (
        "hidden_size",
        "in_channels",
        "temporal_patch_size",
        "patch_size",
        "patch_size",
    ),
    r"pos_embed\.weight": ("num_position_embeddings", "hidden_size"),
    r"blocks\.\d+\.attn\.\w+\.\w+": ("hidden_size", "hidden_size"),
    r"blocks\.\d+\.mlp\.linear_fc1\.\w+": ("intermediate_size", "hidden_size"),
    r"blocks\.\d+\.mlp\.linear_fc2\.\w+": ("hidden_size", "intermediate_size"),
    r"blocks\.\d+\.norm\d\.\w+": ("hidden_size",),
    r"merger\w*(\.\d+)?\.norm\.\w+": ("hidden_size, spatial_merge_size",),
    r"merger\w*(\.\d+)?\.linear_fc1\.\w+": ("hidden_size, spatial_merge_size",) * 2,
    r"merger\w*(\.\d+)?\.linear_fc2\.\w+": (
        "out_hidden_size",
        "hidden_size, spatial_merge_size",
    ),
    r"(input_layernorm|post_attention_layernorm|(^|\.)norm)\.weight": ("hidden_size",),
    r"(operator|ffn|embedding)_norm\.weight": ("hidden_size",),
}
"""Fields by axes of tensors, by suffixes of names; the first match wins."""
_STORED = re.compile(r"\.(qweight|qzeros|scales|g_idx|weight_\w+)$")
"""Tensors in place of a quantised weight, with other axes."""


class _Noted(dict[str, Any]):
    """An object that notes the path of every field that is looked up."""

    def __init__(self, content: Mapping[str, Any], places: tuple[str, ...], read: set[str]) -> None:
        super().__init__(content)
        self._places, self._read = places, read

    def _note(self, name: object) -> None:
        self._read.update(f"{place}{name}" for place in self._places)

    def get(self, name: str, default: Any = None) -> Any:
        self._note(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self._note(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self._note(name)
        return super().__contains__(name)


class Config:
    """A config.json or a section of it.

    Fields that decide shapes or arithmetic are read with `size`, `number` and `given`. transformers
    saves files that leave such fields to its classes. A default named by the family's table is
    therefore used and recorded, and loading compares its consequences with the tensors
    (`check_defaults`).

    Args:
        raw: the content.
        source: the name of transformers' configuration class. An old version may lack it: then the
            table answers instead.
        defaults: of the classes of a family, by class name, then by field. A function computes the
            value from the section that lacks it.
        class_of: returns a class by its name, None if there is none.
        place: prefix of the section's fields in `defaulted`.
        defaulted: the fields left to a class by the file, with the class's name; shared by
            sections.
        read: the paths of all fields that were looked up; shared by sections. One with a dot at its
            end stands for all fields of an object.
        inner: prefixes of the paths of fields that come from nested objects, as in `inlined`.

    Raises:
        CheckpointError: from every method; names the field.
    """

    def __init__(
        self,
        raw: Mapping[str, Any],
        source: str,
        defaults: Defaults | None = None,
        *,
        class_of: Callable[[str], Any] = lambda source: None,
        place: str = "",
        defaulted: dict[str, str] | None = None,
        read: set[str] | None = None,
        inner: tuple[str, ...] = (),
    ) -> None:
        self.read: set[str] = set() if read is None else read
        self.raw = _Noted(raw, (place, *inner), self.read)
        self.defaulted = {} if defaulted is None else defaulted
        self._source = source
        self._class_of = class_of
        self._defaults = {} if defaults is None else defaults
        self._place = place

    @cached_property
    def _kind(self) -> Any:
        return self._class_of(self._source)

    @cached_property
    def _parsed(self) -> Any:
        try:
            # The classes know no dtype of this name.
            given = {name: numbers_of(value) for name, value in self.raw.items() if value != "auto"}
            return self._kind.from_dict(deepcopy(given))
        except Exception as error:  # of many types
            raise CheckpointError(f"config.json: {' '.join(str(error).split())}") from error

    def given(self, name: str) -> Any:
        """Return a field of the file, also under its alternative names, or its default.

        Raises CheckpointError if neither the file nor the family's table has it.
        """
        pairs = getattr(self._kind, "attribute_map", {}).items()
        aliases = [other for pair in pairs if name in pair for other in pair]
        for spelling in (name, *aliases):
            if self.raw.get(spelling) is not None:
                return self.raw[spelling]
        if name not in (known := self._defaults.get(self._source, {})):
            raise CheckpointError(f"config.json lacks {name}")
        self.defaulted[self._place + name] = self._source
        if name in self.raw and self._kind:  # null, which a class may interpret differently
            return self.value(name)
        return known[name](self) if callable(known[name]) else known[name]

    def size(self, name: str) -> int:
        """Return a positive whole number; see `given`. Lengths of lists are bounded."""
        value, most = self.given(name), _MOST.get(name, _LARGEST)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            bound = f" up to {most}" if isinstance(value, int) and value > most else ""
            raise CheckpointError(
                f"{name} in config.json must be a positive integer{bound}, not {value!r:.40}"
            )
        return value

    def number(self, name: str) -> float:
        """Return a number; see `given`. Whole ones are bounded."""
        value = self.given(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{name} in config.json must be a number, not {value!r}")
        try:
            return float(value)
        except OverflowError:
            raise CheckpointError(f"{name} in config.json is too large a number") from None

    def positive(self, name: str) -> float:
        """Return a number above 0 in float32's normal range; see `given`."""
        value, range_ = self.number(name), torch.finfo(torch.float32)
        if not range_.tiny <= value <= range_.max:
            raise CheckpointError(
                f"{name} in config.json must be positive and in float32's range, not {value!r}"
            )
        return value

    def value(self, name: str) -> Any:
        """Return a field as transformers computes it; see `given` for a class that is not
        installed, or lacks it."""
        if self._kind is None:
            return self.given(name)
        self.read.update((self._place + name, f"{self._place}{name}."))
        try:
            return getattr(self._parsed, name)
        except AttributeError as error:
            if name in self._defaults.get(self._source, {}):
                # `given` asks here what null means, so it is not asked in turn: null stays null.
                return None if self.raw.get(name, self) is None else self.given(name)
            raise CheckpointError(
                f"config.json lacks {name}, and transformers {version('transformers')} knows no "
                f"default; a newer one may"
            ) from error

    def expect(self, name: str, expected: object) -> None:
        """Refuse a model in which a field (see `given`) has another value."""
        value = self.given(name)
        if value != expected:
            raise CheckpointError(f"{name} {value!r} is not supported, only {expected!r}")

    def allow(self, name: str, *values: object) -> None:
        """Refuse a model in which a field has another value than these, if the file has it."""
        value = self.raw.get(name)
        if value is not None and value not in values:
            named = f", only {values[0]!r}" if values[0] is not None else ""
            raise CheckpointError(f"{name} {value!r} is not supported{named}")

    def section(self, name: str, source: str = "") -> Config:
        """Return a nested object as a section; `source`: its class, if it is not the whole's."""
        value = self.given(name)
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{name} in config.json must be an object")
        class_name = self._source.removesuffix("Config") + _SECTIONS[name]
        return self._like(value, source or class_name, f"{self._place}{name}.")

    def viewed(self, source: str, kind: str = "") -> Config:
        """Return the same fields as those of another class, by its name; `kind`: with this
        `model_type`."""
        raw = {**self.raw, "model_type": kind} if kind else self.raw
        return self._like(raw, source, self._place)

    def _like(
        self, raw: Mapping[str, Any], source: str, place: str, inner: tuple[str, ...] = ()
    ) -> Config:
        return Config(
            raw,
            source,
            self._defaults,
            class_of=self._class_of,
            place=place,
            defaulted=self.defaulted,
            read=self.read,
            inner=inner,
        )

    def inlined(self, *names: str) -> Config:
        """Return the same config with the fields of the first of these nested objects in the
        file, if any."""
        chosen = next((name for name in names if self.raw.get(name)), None)
        given: Any = {} if chosen is None else self.raw[chosen]
        if not isinstance(given, Mapping):
            raise CheckpointError(f"{names[0]} in config.json must be an object")
        inner = () if chosen is None else (f"{self._place}{chosen}.",)
        return self._like({**self.raw, **given}, self._source, self._place, inner)

    def dtype(self, *sections: Config) -> torch.dtype:
        """Return the dtype of the weights, which sections may name as well; bfloat16 by default
        and where it is `auto`."""
        for section in (self, *sections):
            for name in ("dtype", "torch_dtype"):
                value = section.raw.get(name)
                if value not in (None, "auto"):
                    if not isinstance(value, str) or value not in _DTYPES:
                        raise CheckpointError(f"{name} {value!r} is not supported")
                    return _DTYPES[value]
        return torch.bfloat16


def numbers_of(value: Any) -> Any:
    """Return a list with numbers in place of objects with their names, as which transformers writes
    infinity; anything else as it is."""
    if not isinstance(value, list):
        return value
    return [
        float(one["__float__"]) if isinstance(one, dict) and "__float__" in one else one
        for one in value
    ]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CheckpointError without the folder's name."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"the checkpoint has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        problem = foreign(path) or "cannot be read as JSON"
        raise CheckpointError(f"{path.name} {problem}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} must hold a JSON object")
    return value


@dataclass(frozen=True)
class Changes:
    """Fields that replace those of a config.json.

    Attributes:
        fields: of the whole file; those of nested objects are merged.
        rotation: of the language model's rotary positions, wherever the file has them.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    rotation: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Return the content of the file with the changes."""
        changed = _merged(raw, self.fields)
        if not self.rotation:
            return changed
        *outer, inner = self._rotation_place(changed)
        nested: Mapping[str, Any] = {inner: self.rotation}
        for name in reversed(outer):
            nested = {name: nested}
        return _merged(changed, nested)

    def check(self, raw: Mapping[str, Any], read: Collection[str]) -> None:
        """Check that a model's reader looks at every changed field.

        Args:
            raw: the content of the file with the changes.
            read: the paths that the reader has looked at. One with a dot at its end stands for all
                fields of an object.

        Raises:
            ConfigError: names a field that would have no effect, and its option.
        """
        known = {*read, *_OF_PROMPTS}
        whole = (*_WHOLE, *(path for path in read if path.endswith(".")))
        for path in _paths(self.fields):
            if path not in known and not path.startswith(whole):
                raise _unread("hf_overrides", path, raw, read)
        for name in self.rotation:
            if ".".join((*self._rotation_place(raw), name)) not in read:
                raise _unread("rope_scaling", name, {}, ())

    @staticmethod
    def _rotation_place(raw: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the nested objects that lead to the rotation."""
        text = raw.get("text_config")
        section = text if isinstance(text, Mapping) else raw
        older, newer = ROTATIONS
        name = newer if section.get(newer) and not section.get(older) else older
        return (name,) if section is raw else ("text_config", name)


def _merged(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(raw)
    for name, value in changes.items():
        before = merged.get(name)
        if isinstance(value, Mapping) and isinstance(before, Mapping):
            value = _merged(before, value)
        merged[name] = value
    return merged


def _paths(fields: Mapping[str, Any], place: str = "") -> Iterator[str]:
    """Yield the path of every value that is no object."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _paths(value, f"{place}{name}.")
        else:
            yield place + name


def _unread(option: str, path: str, raw: Mapping[str, Any], read: Collection[str]) -> ConfigError:
    inner = f"text_config.{path}"
    nested = "text_config" in raw and inner in read
    hint = f"; {inner} would" if nested else ""
    return ConfigError(
        f"{option}: {path} has no effect, this model's reader does not look at it{hint}",
        param=option,
    )


def mismatch(name: str, actual: Sequence[int], *wanted: Sequence[int]) -> str:
    """Return the sentence about a tensor of another shape than the config implies.

    Args:
        wanted: the accepted shapes.
    """
    implied = " or ".join(str(list(shape)) for shape in wanted)
    sentence = f"{name} has shape {list(actual)}, the config implies {implied}"
    fields = _fields(name, actual, wanted[0])
    return f"{sentence} by {fields}" if fields else sentence


def _fields(name: str, actual: Sequence[int], wanted: Sequence[int]) -> str:
    """Return the fields behind the axes that differ, "" where none are known."""
    plain = _STORED.sub(".weight", name)
    ends = next((axes for end, axes in _FIELDS.items() if re.search(f"(^|\\.){end}$", plain)), ())
    if plain == name and len(actual) == len(wanted):
        pairs = zip(ends, actual, wanted, strict=False)
        ends = tuple(fields for fields, mine, theirs in pairs if mine != theirs)
    return ", ".join(dict.fromkeys(filter(None, ends)))
