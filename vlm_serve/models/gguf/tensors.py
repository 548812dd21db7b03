"""The tensors of a checkpoint, read from GGUF files: their names, and what makes them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from vlm_serve.errors import CheckpointError
from vlm_serve.models.gguf.blocks import decode
from vlm_serve.models.gguf.reader import BlockType, GgufFile
from vlm_serve.models.gguf.text_config import Architecture, Tensors

_AT_ONCE = 1 << 22
"""Values of blocks that become numbers at a time."""

Indices = Callable[[], torch.Tensor]
Change = Literal["", "less one", "decay", "frames", "rows"]


_BLOCK = re.compile(r"blk\.(\d{1,6})\.(.+)")
_WHOLE = {
    "token_embd.weight": "{}embed_tokens.weight",
    "output_norm.weight": "{}norm.weight",
    "output.weight": "lm_head.weight",
    "cls.output.weight": "score.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ssm_norm": "linear_attn.norm",
}
TOWER = ("v.", "mm.")
"""Beginnings of a vision tower's names, which may lie in the model's own file; see `vision`."""
_DRAFT = "mtp."  # Ollama's older draft layers are left out.
_FACTORS = (".scale", ".input_scale")
"""Ends of names beside NVFP4: a factor of a weight or of each expert, and those of activations."""
EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_down_exps": ("down_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
}
_PREDICTOR = {
    "nextn.eh_proj": "mtp.fc",
    "nextn.enorm": "mtp.pre_fc_norm_embedding",
    "nextn.hnorm": "mtp.pre_fc_norm_hidden",
    "nextn.shared_head_norm": "mtp.norm",
}
_IGNORED = frozenset({"nextn.embed_tokens", "nextn.shared_head_head"})
"""Copies of the model's own embeddings and head."""


@dataclass(frozen=True, slots=True)
class TensorRecipe:
    """A tensor, and how it follows from one in a file.

    Attributes:
        source: name in the file.
        shape: in the checkpoint.
        index: in the file's first dimension, of a tensor that stacks experts.
        rows, columns: returns those to take, in their order; None: all.
        change: of the numbers. "less one": the file adds 1 to centred norms. "decay": it holds the
            negated exponential. "frames": `others` is the kernel of the second frame. "rows": those
            of `others` follow.
        labels: rows that the file has; the others are zero.
    """

    source: str
    shape: tuple[int, ...]
    index: int | None = None
    rows: Indices | None = None
    columns: Indices | None = None
    change: Change = ""
    others: tuple[str, ...] = ()
    labels: tuple[int, ...] = ()

    @property
    def plain(self) -> bool:
        """Return True if blocks become numbers, as those of rows from several tensors do."""
        return bool(self.labels) or self.change == "rows"


def blocks_of(weight: str, kind: BlockType) -> str:
    """Return the name of a weight's blocks."""
    return f"{weight}_{kind.name}"


def factor_of(weight: str) -> str:
    """Return the name of the factor of a weight in blocks, if it has one."""
    return f"{weight}_factor"


def columns_of(weight: str) -> str:
    """Return the name of the order of a weight's columns, if it has another one in the file."""
    return f"{weight}_columns"


class GgufTensors:
    """Tensors by the names of a checkpoint.

    A weight in blocks is there three times: as numbers, as its blocks (`blocks_of`) and, where its
    columns are in another order, as that order (`columns_of`).

    Args:
        parts: files, each with the tensors made from it.

    Attributes:
        nbytes: size of the files.
    """

    def __init__(self, parts: Iterable[tuple[GgufFile, Mapping[str, TensorRecipe]]]) -> None:
        self._recipes: dict[str, tuple[GgufFile, TensorRecipe]] = {}
        self._coded: dict[str, str] = {}
        self._columns: dict[str, str] = {}
        self._files: dict[str, GgufFile] = {}
        for file, tensors in parts:
            self._files |= dict.fromkeys(file.tensors, file)
            for name, recipe in tensors.items():
                self._recipes[name] = file, recipe
                kind = file.tensors[recipe.source].type
                if kind.quantised and not recipe.plain:
                    self._coded[blocks_of(name, kind)] = name
                    if recipe.columns is not None:
                        self._columns[columns_of(name)] = name
        self.nbytes = sum(file.nbytes for file in set(self._files.values()))

    def names(self) -> Iterable[str]:
        """Return the names of all tensors."""
        return [*self._recipes, *self._coded, *self._columns]

    def source(self, name: str) -> str:
        """Return the name in the file of what a tensor is made of."""
        weight = self._columns.get(name) or self._coded.get(name) or name
        return self._recipes[weight][1].source

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        if name in self._columns:
            return (self._recipes[self._columns[name]][1].shape[1],)
        if name in self._coded:
            file, recipe = self._recipes[self._coded[name]]
            kind = file.tensors[recipe.source].type
            return recipe.shape[0], recipe.shape[1] // kind.values * kind.nbytes
        return self._recipes[name][1].shape

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor, which must not be written to."""
        if name in self._columns:
            recipe = self._recipes[self._columns[name]][1]
            assert recipe.columns is not None
            return recipe.columns()
        if name in self._coded:
            file, recipe = self._recipes[self._coded[name]]
            return _chosen(file.blocks(recipe.source), recipe)
        file, recipe = self._recipes[name]
        others = (TensorRecipe(each, ()) for each in recipe.others)
        return _changed(file, recipe, [_numbers(self._files[own.source], own) for own in others])


def types_of(file: GgufFile, tensors: Mapping[str, TensorRecipe]) -> dict[str, BlockType]:
    """Return the types of the weights in blocks."""
    coded = {name: recipe.source for name, recipe in tensors.items() if not recipe.plain}
    kinds = {name: file.tensors[source].type for name, source in coded.items()}
    for name, kind in kinds.items():
        if kind.quantised and (len(tensors[name].shape) != 2 or tensors[name].others):
            raise CheckpointError(
                f"{tensors[name].source} in {file.path.name} has the type {kind.name}, which is "
                "not supported for it"
            )
    return {name: kind for name, kind in kinds.items() if kind.quantised}


def _chosen(whole: torch.Tensor, recipe: TensorRecipe) -> torch.Tensor:
    """Return the rows of one expert, or some of them."""
    if recipe.index is not None:
        whole = whole[recipe.index]
    return whole if recipe.rows is None else whole[recipe.rows()]


def _numbers(file: GgufFile, recipe: TensorRecipe) -> torch.Tensor:
    """Return a source's numbers as they are in the file."""
    kind = file.tensors[recipe.source].type
    if kind.quantised:
        return _values(_chosen(file.blocks(recipe.source), recipe), kind)
    return _chosen(file.numbers(recipe.source), recipe)


def _changed(file: GgufFile, recipe: TensorRecipe, others: list[torch.Tensor]) -> torch.Tensor:
    values = _numbers(file, recipe)
    if recipe.columns is not None:
        values = values[:, recipe.columns()]
    if recipe.change == "less one":
        values = values.float() - 1
    elif recipe.change == "decay":
        values = values.float().neg().log()
    elif recipe.change == "frames":
        values = torch.stack([values, *others], 2)
    elif recipe.change == "rows":
        values = torch.cat([values, *others])
    if recipe.labels:
        labels = torch.tensor(recipe.labels)
        return torch.zeros(recipe.shape).index_copy_(0, labels, values.float())
    return values.reshape(recipe.shape)


def _values(blocks: torch.Tensor, kind: BlockType) -> torch.Tensor:
    rows, width = blocks.shape[0], blocks.shape[1] // kind.nbytes * kind.values
    values = torch.empty(rows, width)
    step = max(1, _AT_ONCE // width)
    for first in range(0, rows, step):
        values[first : first + step] = decode(kind, blocks[first : first + step]).values()
    return values


Item = tuple[str, TensorRecipe]


class TextNames:
    """Names and contents of a model's tensors.

    Args:
        kind: the architecture.
        config: the language model's part of config.json.
        prefix: of names in the checkpoint.
        file: name of the file, for messages.
    """

    def __init__(
        self, kind: Architecture, config: Mapping[str, Any], prefix: str, file: str
    ) -> None:
        self._kind, self._config, self._prefix, self._file = kind, config, prefix, file
        self._layers: int = config["num_hidden_layers"]

    def recipes(self, tensors: Tensors) -> dict[str, TensorRecipe]:
        """Return every tensor by its name.

        Raises:
            CheckpointError: a tensor that the architecture does not have, or of a wrong shape.
        """
        recipes: dict[str, TensorRecipe] = {}
        for name, entry in tensors.items():
            if name.startswith((*TOWER, _DRAFT)) or name.endswith(_FACTORS):
                continue
            scale = f"{name.removesuffix('weight')}scale"
            for target, recipe in self._of(name, entry.shape):
                recipes[target] = recipe
                if scale in tensors:
                    at = recipe.index or 0
                    self._check(
                        scale, (*tensors[scale].shape, -1), 0, max(entry.shape[:-2], default=1)
                    )
                    recipes[factor_of(target)] = TensorRecipe(scale, (1,), rows=_span(at, 1))
        return recipes

    def _of(self, name: str, shape: tuple[int, ...]) -> Iterator[Item]:
        if name in _WHOLE:
            yield _WHOLE[name].format(self._prefix), self._plain(name, shape)
            return
        match = _BLOCK.fullmatch(name)
        if match is None:
            raise self._unknown(name)
        index, part = int(match[1]), match[2]
        base, _, end = part.rpartition(".")
        if end not in ("weight", "bias"):
            base, end = part, ""
        if base in _IGNORED or (index >= self._layers and not self._predicts):
            return
        if base in _PREDICTOR:
            yield f"{_PREDICTOR[base]}.{end}", self._plain(name, shape)
            return
        layer = f"{self._prefix}layers.{index}."
        if index >= self._layers:
            layer = f"mtp.layers.{index - self._layers}."
        yield from self._of_layer(name, layer, base, end, shape)

    @property
    def _predicts(self) -> bool:
        return bool(self._config.get("mtp_num_hidden_layers", 0) == 1)

    def _of_layer(
        self, name: str, layer: str, base: str, end: str, shape: tuple[int, ...]
    ) -> Iterator[Item]:
        if base in LAYER:
            recipe = self._plain(name, shape)
            if base == "ffn_gate_inp_shexp" and len(shape) == 1:
                recipe = TensorRecipe(name, (1, *shape))
            yield f"{layer}{LAYER[base]}.{end}", recipe
        elif base in EXPERTS and len(shape) == 3:
            yield from self._experts(name, layer, EXPERTS[base], shape)
        elif base == "attn_qkv" and self._attends(layer):
            yield from self._fused(name, layer, end, shape)
        elif self._kind.state:
            yield from self._of_state(name, f"{layer}linear_attn.", base, end, shape)
        else:
            raise self._unknown(name)

    def _plain(self, name: str, shape: tuple[int, ...]) -> TensorRecipe:
        centred = self._kind.centred and name.endswith("norm.weight")
        lowered = centred and not name.endswith("ssm_norm.weight")
        return TensorRecipe(name, shape, change="less one" if lowered else "")

    def _experts(
        self, name: str, layer: str, kinds: tuple[str, ...], shape: tuple[int, ...]
    ) -> Iterator[Item]:
        count, rows, depth = shape
        self._check(name, shape, 0, self._config["num_experts"])
        width = rows // len(kinds)
        for expert in range(count):
            for place, kind in enumerate(kinds):
                chosen = _span(place * width, width) if len(kinds) > 1 else None
                yield (
                    f"{layer}mlp.experts.{expert}.{kind}.weight",
                    TensorRecipe(name, (width, depth), index=expert, rows=chosen),
                )

    def _attends(self, layer: str) -> bool:
        """Return True for layers with attention; those that predict tokens have it too."""
        types: list[str] | None = self._config.get("layer_types")
        if types is None or layer.startswith("mtp."):
            return True
        return bool(types[int(layer.rstrip(".").rpartition(".")[2])] == "full_attention")

    def _fused(self, name: str, layer: str, end: str, shape: tuple[int, ...]) -> Iterator[Item]:
        config, dim = self._config, self._config["head_dim"]
        gates = 2 if config.get("attn_output_gate") else 1
        keys = config["num_key_value_heads"] * dim
        widths = (gates * config["num_attention_heads"] * dim, keys, keys)
        self._check(name, shape, 0, sum(widths))
        first = 0
        for kind, width in zip("qkv", widths, strict=True):
            recipe = TensorRecipe(name, (width, *shape[1:]), rows=_span(first, width))
            yield f"{layer}self_attn.{kind}_proj.{end}", recipe
            first += width

    def _of_state(
        self, name: str, place: str, base: str, end: str, shape: tuple[int, ...]
    ) -> Iterator[Item]:
        """Yield a Gated DeltaNet's tensors, value heads in the order of their key heads."""
        config = self._config
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        key_dim, dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        if values % keys:
            raise CheckpointError(f"{self._file} has {values} value heads for {keys} key heads")
        both, channels = 2 * keys * key_dim, 2 * keys * key_dim + values * dim
        wanted = {
            "attn_qkv": ("in_proj_qkv.weight", 0, channels, dim, both),
            "attn_gate": ("in_proj_z.weight", 0, values * dim, dim, 0),
            "ssm_alpha": ("in_proj_a.weight", 0, values, 1, 0),
            "ssm_beta": ("in_proj_b.weight", 0, values, 1, 0),
            "ssm_conv1d": ("conv1d.weight", 0, channels, dim, both),
            "ssm_dt": ("dt_bias", 0, values, 1, 0),
            "ssm_a": ("A_log", 0, values, 1, 0),
            "ssm_out": ("out_proj.weight", 1, values * dim, dim, 0),
        }
        if base in ("ssm_ba", "ssm_in"):
            yield from self._interleaved(name, place, base, shape)
            return
        if base not in wanted:
            raise self._unknown(name)
        target, axis, size, width, first = wanted[base]
        self._check(name, shape, axis, size)
        order: Indices | None = None
        if self._kind.tiled and values != keys:
            order = _grouped(keys, values // keys, width, first)
        rows, columns = (order, None) if axis == 0 else (None, order)
        stored = (shape[0], 1, *shape[1:]) if base == "ssm_conv1d" else shape
        change: Change = "decay" if base == "ssm_a" else ""
        yield place + target, TensorRecipe(name, stored, rows=rows, columns=columns, change=change)

    def _interleaved(
        self, name: str, place: str, base: str, shape: tuple[int, ...]
    ) -> Iterator[Item]:
        """Yield the tensors of Qwen3-Next whose rows lie together by key heads."""
        config = self._config
        keys = config["linear_num_key_heads"]
        shared = config["linear_num_value_heads"] // keys
        key_dim, value_dim = config["linear_key_head_dim"], shared * config["linear_value_head_dim"]
        widths: tuple[int, ...] = (shared, shared)
        parts: dict[str, tuple[int, ...]] = {"in_proj_b": (0,), "in_proj_a": (1,)}
        if base == "ssm_in":
            widths = (key_dim, key_dim, value_dim, value_dim)
            parts = {"in_proj_qkv": (0, 1, 2), "in_proj_z": (3,)}
        self._check(name, shape, 0, keys * sum(widths))
        for target, kinds in parts.items():
            rows = keys * sum(widths[kind] for kind in kinds)
            order = _block_rows(keys, widths, kinds)
            yield f"{place}{target}.weight", TensorRecipe(name, (rows, *shape[1:]), rows=order)

    def _check(self, name: str, shape: tuple[int, ...], axis: int, size: int) -> None:
        if len(shape) <= axis or shape[axis] != size or math.prod(shape) == 0:
            raise CheckpointError(
                f"{name} in {self._file} has the shape {list(shape)}, but its metadata implies "
                f"{size} in place {axis}"
            )

    def _unknown(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"{self._file} has a tensor {name}, which its architecture does not have"
        )


def _grouped(key_heads: int, per_key: int, size: int, first: int = 0) -> Indices:
    """Return the rows of value heads in the order of their key heads.

    Files hold the first value head of every key head, then the second of every one, and so on.

    Args:
        key_heads: their number.
        per_key: value heads of each.
        size: rows of a value head.
        first: rows before them, which stay in place.
    """

    def indices() -> torch.Tensor:
        whole = torch.arange(key_heads * per_key * size).view(per_key, key_heads, size)
        moved = first + whole.transpose(0, 1).reshape(-1)
        return torch.cat([torch.arange(first), moved])

    return indices


def _block_rows(groups: int, widths: tuple[int, ...], wanted: tuple[int, ...]) -> Indices:
    """Return some rows of every group, all of the first kind before those of the next.

    Args:
        groups: their number.
        widths: rows of each kind within a group.
        wanted: the kinds to take.
    """

    def indices() -> torch.Tensor:
        whole = torch.arange(groups * sum(widths)).view(groups, -1)
        kinds = torch.split_with_sizes(whole, widths, 1)
        return torch.cat([kinds[kind].reshape(-1) for kind in wanted])

    return indices


def _span(first: int, count: int) -> Indices:
    """Return consecutive rows."""
    return lambda: torch.arange(first, first + count)
