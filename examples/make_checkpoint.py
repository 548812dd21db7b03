"""Write a random-weight checkpoint, dense or MoE, that transformers loads unchanged.

    python examples/make_checkpoint.py /tmp/tiny --hidden-size 64 --num-layers 4
    python examples/make_checkpoint.py /tmp/tiny-moe --num-experts 8 --experts-per-token 2
    python examples/make_checkpoint.py /tmp/tiny-vl --family qwen3_vl
    python examples/make_checkpoint.py /tmp/tiny-omni --family qwen3_omni
    python examples/make_checkpoint.py /tmp/tiny-next --family qwen3_next
    python examples/make_checkpoint.py /tmp/tiny-qwen3 --family qwen3
    python examples/make_checkpoint.py /tmp/tiny-qwen25-vl --family qwen2_5_vl
    python examples/make_checkpoint.py /tmp/tiny-minicpm --family minicpmv4_6
    python examples/make_checkpoint.py /tmp/tiny-lfm2 --family lfm2
    python examples/make_checkpoint.py /tmp/tiny-internvl --family internvl
    python examples/make_checkpoint.py /tmp/tiny-fp8 --dtype bfloat16 --quantization fp8

The weights are drawn to make outputs sensitive to the input: every layer contributes about as much
as the embedding, decays span short and long memories, and greedy output depends on all the prompt.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import checkpoint_internvl
import checkpoint_omni
import checkpoint_qwen2
import torch
from checkpoint_config import full_config, text_config
from checkpoint_lfm2 import NAMED_TOKENS as TILE_NAMES
from checkpoint_lfm2 import TILE_TOKENS, write_processor
from checkpoint_minicpm import NAMED_TOKENS, token_ids, write_processors
from checkpoint_parts import (
    PLAIN_SPLIT_PATTERN,
    SPLIT_PATTERN,
    MediaShape,
    build_tokenizer,
    media_token_ids,
    sample_text,
    token_id,
    write_generation_config,
    write_json,
    write_processor_files,
    write_tokenizer_files,
)
from checkpoint_spec import BENCHMARK_SPECS, DTYPES, FAMILIES, SMALL_SPECS, CheckpointSpec
from quantised_weights import FORMATS, quantise_weights, quantization_config
from random_weights import draw, entries
from safetensors.torch import save_file

_TOKENIZERS = {
    "qwen3_5": ("Qwen3_5Tokenizer", SPLIT_PATTERN),
    "minicpmv4_6": ("TokenizersBackend", SPLIT_PATTERN),
    "minicpmv4_7": ("TokenizersBackend", SPLIT_PATTERN),
    "minicpm_ocr": ("TokenizersBackend", SPLIT_PATTERN),
}
"""Of families with one of their own: its class, and how it splits words."""


def make_checkpoint(path: Path | str, spec: CheckpointSpec | None = None) -> Path:
    """Write the checkpoint directory `path` (created if missing) and return it.

    The same spec gives the same bytes.
    """
    path, spec = Path(path), spec or CheckpointSpec()
    path.mkdir(parents=True, exist_ok=True)
    kind, split = _TOKENIZERS.get(spec.family, ("Qwen2Tokenizer", PLAIN_SPLIT_PATTERN))
    texts = sample_text(4 * spec.vocab_size, spec.seed)
    named = TILE_NAMES if spec.tiled else NAMED_TOKENS if spec.sliced else None
    places = TILE_TOKENS if spec.tiled else ()
    bare = named is not None or spec.family == "internvl"
    if spec.family == "internvl":
        named, places = checkpoint_internvl.NAMED_TOKENS, ()
    elif spec.family == "qwen3_omni":
        named = checkpoint_omni.NAMED_TOKENS
    more = [*(named or {}).values(), *places]
    tokenizer = build_tokenizer(texts, spec.vocab_size, split, more)
    write_tokenizer_files(
        path,
        tokenizer,
        max_length=spec.max_position_embeddings,
        kind=kind,
        processor=_processor(spec),
        named=named,
        bare=bare,
    )
    write_generation_config(path, tokenizer)
    config = text_config(spec) | {"eos_token_id": token_id(tokenizer, "<|endoftext|>")}
    if spec.sliced:
        write_processors(path, spec)
        config = full_config(spec, config) | token_ids(spec, tokenizer)
    elif spec.family == "internvl":
        checkpoint_internvl.write_processor(path, spec)
        image = {"image_token_id": token_id(tokenizer, "<IMG_CONTEXT>")}
        config = full_config(spec, config) | image
    elif spec.tiled:
        write_processor(path, spec)
        image = {"image_token_id": token_id(tokenizer, "<|image_pad|>")}
        config = full_config(spec, config) | image
    elif spec.vision_depth:
        if spec.older:
            checkpoint_qwen2.write_processors(path, spec)
        elif spec.family == "qwen3_omni":
            checkpoint_omni.write_processors(path, spec)
        else:
            write_processor_files(path, _media_shape(spec))
        config = full_config(spec, config) | media_token_ids(tokenizer)
        if spec.family == "qwen3_omni":
            config = checkpoint_omni.fields(spec, config, tokenizer)
    weights: Mapping[str, torch.Tensor] = _Drawn(spec)
    if spec.quantization:
        kind, group = spec.quantization, spec.group_size
        config["quantization_config"] = quantization_config(weights, kind, group)
        transposed = spec.kin == "qwen3_vl" and not spec.experts_apart
        weights = quantise_weights(weights, kind, group, transposed=transposed)
    write_json(path / "config.json", config)
    _write_weights(path, weights, spec.shards)
    return path


def _processor(spec: CheckpointSpec) -> str | None:
    if not spec.vision_depth:
        return None
    named = spec.sliced or spec.tiled or spec.older or spec.family == "qwen3_omni"
    return f"{spec.architecture}Processor" if named else "Qwen3VLProcessor"


def _media_shape(spec: CheckpointSpec) -> MediaShape:
    return MediaShape(
        patch_size=spec.patch_size,
        temporal_patch_size=spec.temporal_patch_size,
        merge_size=spec.spatial_merge_size,
        image_min_pixels=spec.image_min_pixels,
        image_max_pixels=spec.image_max_pixels,
        video_min_pixels=spec.video_min_pixels,
        video_max_pixels=spec.video_max_pixels,
    )


class _Drawn(Mapping[str, torch.Tensor]):
    """Weights drawn on access, so that only one shard at a time is in memory."""

    def __init__(self, spec: CheckpointSpec) -> None:
        self._entries = {name: (shape, rule) for name, shape, rule in entries(spec)}
        self._seed, self._dtype = spec.seed, DTYPES[spec.dtype]

    def __getitem__(self, name: str) -> torch.Tensor:
        shape, rule = self._entries[name]
        return draw(name, shape, rule, self._seed).to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _write_weights(path: Path, weights: Mapping[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(dict(weights), path / "model.safetensors", metadata={"format": "pt"})
        return
    names, total = list(weights), 0
    index: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[shard::shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
        total += sum(tensor.nbytes for tensor in part.values())
    write_json(
        path / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": index},
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, with one flag per field of CheckpointSpec."""
    parser = argparse.ArgumentParser(description="Write a random-weight checkpoint.")
    parser.add_argument("path", type=Path, help="directory to write")
    parser.add_argument(
        "--benchmark",
        action="store_true",
        help="start from the benchmarks' 49M-parameter model",
    )
    fields = dataclasses.fields(CheckpointSpec)
    choices = {"dtype": list(DTYPES), "family": list(FAMILIES), "quantization": list(FORMATS)}
    for field in fields:
        flag, default = "--" + field.name.replace("_", "-"), field.default
        if isinstance(default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=f"({default})")
        else:
            known = choices.get(field.name)
            parser.add_argument(flag, type=type(default), choices=known, help=f"({default})")
    values = vars(parser.parse_args(arguments))
    bases, family = BENCHMARK_SPECS if values["benchmark"] else SMALL_SPECS, values["family"]
    base = bases.get(family or CheckpointSpec.family)
    if base is None:
        parser.error(f"there is no benchmark model of {family}")
    given = {f.name: values[f.name] for f in fields if values[f.name] is not None}
    try:
        spec = dataclasses.replace(base, **given)
        make_checkpoint(values["path"], spec)
    except ValueError as error:
        parser.error(str(error))
    num_weights = sum(math.prod(shape) for _, shape, _ in entries(spec))
    stored = f"{spec.quantization} and {spec.dtype}" if spec.quantization else spec.dtype
    print(f"{values['path']}: {num_weights / 1e6:.2f}M weights, {stored}")


if __name__ == "__main__":
    main()
