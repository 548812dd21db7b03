"""Folders of adapters: what is read, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SPECS
from make_checkpoint import make_checkpoint
from peft_folders import linears, random_factors, write_adapter

from vlm_serve.errors import CheckpointError, ModelNotFoundError
from vlm_serve.models import load_model
from vlm_serve.models.adapters import place, read_adapter

SIZES = {
    "model.layers.0.self_attn.q_proj": (8, 6),
    "model.layers.1.mlp.down_proj": (6, 8),
}
Q, DOWN = SIZES


def saved(folder: Path, rank: int = 4, ranks: dict[str, int] | None = None, **fields: Any) -> Path:
    return write_adapter(folder, random_factors(SIZES, 1, rank=rank, ranks=ranks or {}), **fields)


def test_ranks_and_scales_follow_patterns(tmp_path: Path) -> None:
    folder = saved(
        tmp_path,
        ranks={"down_proj": 2},
        rank_pattern={"down_proj": 2},
        alpha_pattern={r"layers\.0\..*q_proj": 20},
    )
    found = read_adapter(folder).modules
    assert {name: each.rank for name, each in found.items()} == {Q: 4, DOWN: 2}
    assert {name: each.scale for name, each in found.items()} == {Q: 20 / 4, DOWN: 8 / 2}
    folder = saved(tmp_path / "root", use_rslora=True)
    assert read_adapter(folder).modules[Q].scale == 8 / 4**0.5


def test_a_pattern_is_an_end_of_a_name_at_a_dot(tmp_path: Path) -> None:
    folder = saved(tmp_path, alpha_pattern={"proj": 99, "q_proj": 4})
    assert read_adapter(folder).modules[Q].scale == 1.0


def test_a_pattern_that_re_would_try_for_ever_fits_or_does_not(tmp_path: Path) -> None:
    """`re` would hold all other requests meanwhile, and signals."""
    folder = saved(tmp_path, alpha_pattern={"([a-z0-9._]+)+X": 99, "(([a-z_0-9]|[a-z])+)+j": 4})
    assert read_adapter(folder).modules[Q].scale == 1.0


def test_factors_keep_their_type_or_get_another(tmp_path: Path) -> None:
    halves = {name: each.bfloat16() for name, each in random_factors(SIZES, 1).items()}
    folder = write_adapter(tmp_path, halves)
    assert read_adapter(folder).modules[Q].down.dtype == torch.bfloat16
    assert read_adapter(folder, torch.float32).modules[Q].up.dtype == torch.float32


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "biases"),
        ({"lora_bias": True}, "lora_bias"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model's weights"),
        ({"something_new": 3}, "something_new is set"),
        ({"r": 0}, "r 0 is no rank"),
        ({"r": 257}, "no rank from 1 to 256"),
        ({"lora_alpha": "much"}, "lora_alpha 'much' is no number"),
        ({"lora_alpha": 10**400}, "lora_alpha 1000"),
        ({"lora_alpha": 1e308}, "lora_alpha 1e+308 is no number of float32"),
        ({"lora_alpha": -1e39}, "lora_alpha -1e+39 is no number of float32"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan is no number"),
        ({"lora_alpha": float("-inf")}, "lora_alpha -inf is no number"),
        ({"alpha_pattern": {"q_proj": 10**400}}, "is no number of float32"),
        ({"r": 10**400}, "is no rank from 1"),
        ({"peft_type": "x" * 10**6}, "only LORA is supported"),
        ({"x" * 10**6: 1}, "is set, and is not supported"),
        ({"rank_pattern": {"(": 2}}, "is no pattern"),
        ({"alpha_pattern": {"a)|(b": 2}}, "alpha_pattern: 'a)|(b' is no pattern"),
        ({"rank_pattern": {"(?:" * 99 + "x" + "){9}" * 99: 4}}, "repeats too much"),
        ({"rank_pattern": [2]}, "rank_pattern is no table"),
    ],
)
def test_fields_that_are_not_supported_are_named(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    folder = saved(tmp_path)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    with pytest.raises(CheckpointError) as caught:
        read_adapter(folder)
    assert words in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("field", ["r", "rank_pattern"])
def test_no_field_is_dropped_in_silence(tmp_path: Path, field: str) -> None:
    folder = saved(tmp_path)
    text = (folder / "adapter_config.json").read_text()
    more = '{"r": 4, "r": 8,' if field == "r" else '{"rank_pattern": {"q": 4, "q": 8},'
    (folder / "adapter_config.json").write_text(text.replace("{", more, 1))
    with pytest.raises(CheckpointError, match=r"adapter_config.json has '[rq]' twice"):
        read_adapter(folder)


def test_a_table_that_nests_deeply_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    for text in ("[" * 200_000, '{"a":' * 100_000 + "1" + "}" * 100_000):
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"adapter_config\.json cannot be read"):
            read_adapter(folder)


def _renamed(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {name.replace(old, new): each for name, each in tensors.items()}


def _copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in tensors.items()}


def _with_nan(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    next(iter(tensors.values()))[0, 0] = float("nan")
    return tensors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_renamed(".lora_A.", ".lora_embedding_A."), "a tuned table of embeddings"),
        (_renamed(".lora_B.weight", ".lora_B.bias"), "a tuned bias"),
        (_renamed(".lora_A.weight", ".lora_magnitude_vector"), "DoRA's magnitudes"),
        (_renamed("q_proj.lora_A", "q_proj.modules_to_save"), "a module saved whole"),
        (_renamed("lora_A.weight", "other.weight"), "no tensor of LoRA"),
        (_with_nan, "NaN or infinite"),
        (lambda t: {k: v for k, v in t.items() if "lora_B" not in k}, "has no lora_B.weight"),
        (lambda t: {k: v[:2] if "lora_A" in k else v for k, v in t.items()}, "has rank 2 in"),
        (lambda t: {k: v.to(torch.int8) for k, v in t.items()}, "torch.int8"),
        (lambda t: {k: v[0] for k, v in t.items()}, "expected two dimensions"),
        (lambda t: {}, "holds no tensors"),
        (lambda t: t | _renamed("base_model.model.", "")(_copied(t)), "twice: with the prefix"),
        (
            lambda t: t | _renamed(".weight", ".default.weight")(_copied(t)),
            "twice: with the prefix",
        ),
        (lambda t: {k: 1e20 * v for k, v in t.items()}, "is too large for float32"),
        (_renamed(".lora_A", "x" * 5000 + ".lora_A"), "is too long for the name of a tensor"),
    ],
)
def test_tensors_that_are_not_supported_are_named(
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    words: str,
) -> None:
    write_adapter(tmp_path, change(random_factors(SIZES, 1)))
    with pytest.raises(CheckpointError) as caught:
        read_adapter(tmp_path)
    assert words in str(caught.value) and len(str(caught.value)) < 500


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="neither a directory nor"):
        read_adapter(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no adapter of PEFT"):
        read_adapter(tmp_path)
    folder = saved(tmp_path)
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="is not a readable safetensors file"):
        read_adapter(folder)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a pickle"):
        read_adapter(folder)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json cannot be read"):
        read_adapter(folder)


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        ("dense", "model.language_model.layers.0.linear_attn.conv1d", "has no such modules, 1 of"),
        ("dense", "model.language_model.layers.9.mlp.up_proj", "layers.9.mlp.up_proj"),
        (
            "text, moe",
            "model.layers.0.mlp.experts",
            "target_parameters of adapter_config.json names 0",
        ),
        ("text, moe", "model.layers.0.mlp.experts.1.up_proj", "changes routed experts"),
    ],
)
def test_modules_that_the_model_lacks_are_listed(
    tmp_path: Path, name: str, module: str, words: str
) -> None:
    path = make_checkpoint(tmp_path / "model", SPECS[name])
    modules = load_model(path, torch.float32, "cpu").modules
    folder = write_adapter(tmp_path / "adapter", random_factors({module: (64, 64)}, 1))
    with pytest.raises(CheckpointError) as caught:
        place(read_adapter(folder), modules)
    assert words in str(caught.value)


def test_an_adapter_of_another_size_is_of_another_model(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", SPECS["dense"])
    modules = load_model(path, torch.float32, "cpu").modules
    sizes = {name: (out + 8, depth) for name, (out, depth) in linears(path).items()}
    folder = write_adapter(tmp_path / "adapter", random_factors(sizes, 1))
    with pytest.raises(CheckpointError, match="is of another model"):
        place(read_adapter(folder), modules)


def test_the_digest_names_what_decides_bits(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", SPECS["vl"])
    modules = load_model(path, torch.float32, "cpu").modules
    text = {name: size for name, size in linears(path).items() if "language_model.layers" in name}

    def digest(folder: str, seed: int, scale: int = 8, **kwargs: Any) -> tuple[str, str]:
        write_adapter(tmp_path / folder, random_factors(text, seed), lora_alpha=scale)
        placed = place(read_adapter(tmp_path / folder, **kwargs), modules)
        return placed.digest, placed.vision_digest

    first = digest("a", 1)
    assert digest("b", 1) == first and first[1] == ""
    others = [digest("c", 2), digest("d", 1, 9), digest("e", 1, dtype=torch.bfloat16)]
    assert len({first, *others}) == 4
    tower = {name: size for name, size in linears(path).items() if "visual" in name}
    write_adapter(tmp_path / "f", random_factors(tower, 1))
    seeing = place(read_adapter(tmp_path / "f"), modules)
    assert seeing.vision_digest == seeing.digest


@pytest.mark.parametrize(
    ("fields", "mergeable"),
    [
        ({"use_dora": True}, True),
        ({"modules_to_save": ["lm_head"]}, True),
        ({"trainable_token_indices": [1]}, True),
        ({"lora_bias": True}, True),
        ({"bias": "lora_only"}, True),
        ({"init_lora_weights": "pissa"}, True),
        ({"peft_type": "LOKR"}, True),
        ({"newer_field": True}, True),
        ({"alora_invocation_tokens": [1]}, False),
        ({"peft_type": "PROMPT_TUNING"}, False),
    ],
)
def test_a_refusal_says_how_to_merge(
    tmp_path: Path, fields: dict[str, Any], mergeable: bool
) -> None:
    folder = write_adapter(tmp_path, random_factors({"q_proj": (8, 8)}, 1), **fields)
    with pytest.raises(CheckpointError) as caught:
        read_adapter(folder)
    message = caught.value.message
    for line in ("AutoModelForImageTextToText", "merge_and_unload", "AutoProcessor"):
        assert (line in message) == mergeable, message


def test_a_pickle_says_how_to_merge(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, random_factors({"q_proj": (8, 8)}, 1))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"a pickle: save it anew.*merge_and_unload"):
        read_adapter(folder)
