"""The model's own tensors in an adapter's file, as PEFT saves them with a changed `lm_head`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_spec import CheckpointSpec
from families import SPECS
from gguf import GGMLQuantizationType as Kind
from gguf_writer import WIDE, blocks, write_model
from make_checkpoint import make_checkpoint
from peft_folders import linears, random_factors, write_adapter
from safetensors.torch import load_file

from vlm_serve.engine.features.adapters.options import LoRA
from vlm_serve.errors import CheckpointError
from vlm_serve.models.adapters import read_adapter
from vlm_serve.models.adapters.compatibility import check_base
from vlm_serve.models.files import resolve_checkpoint
from vlm_serve.models.registry import read_spec
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

TENSORS = dict[str, torch.Tensor]
PREFIX = "base_model.model."
HEAD = f"{PREFIX}lm_head.base_layer.weight"
EMBEDDINGS = f"{PREFIX}model.language_model.embed_tokens.weight"


def weights(path: Path) -> TENSORS:
    found: TENSORS = {}
    for each in path.glob("*.safetensors"):
        found |= load_file(each)
    return found


def adapter(folder: Path, path: Path, more: TENSORS, part: str = "q_proj") -> Path:
    """An adapter of some Linears of a model with further tensors."""
    sizes = {name: size for name, size in linears(path).items() if part in name}
    return write_adapter(folder, random_factors(sizes, 1) | more)


def check(path: Path, folder: Path) -> None:
    check_base(path, read_adapter(folder), tied=read_spec(path).tied_embeddings)


@pytest.fixture(scope="module", params=[False, True], ids=["apart", "tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, with tied embeddings or without."""
    spec = dataclasses.replace(SPECS["dense"], tied_embeddings=request.param, dtype="bfloat16")
    return make_checkpoint(tmp_path_factory.mktemp("base") / "model", spec)


def head_of(model: Path) -> torch.Tensor:
    own = weights(model)
    return next(
        each
        for end in ("lm_head.weight", "embed_tokens.weight")
        for name, each in own.items()
        if name.endswith(end)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_tensors_of_the_model_itself_change_nothing(
    tmp_path: Path, model: Path, dtype: torch.dtype
) -> None:
    own = weights(model)["model.language_model.embed_tokens.weight"]
    more = {HEAD: head_of(model).to(dtype), EMBEDDINGS: own.to(dtype)}
    folder = adapter(tmp_path / "more", model, more, "lm_head")
    plain = adapter(tmp_path / "plain", model, {}, "lm_head")
    check(model, folder)
    assert read_adapter(folder).modules.keys() == read_adapter(plain).modules.keys()


def test_a_copy_rounded_to_a_smaller_type_is_the_models(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", SPECS["dense"])
    head = head_of(path)
    assert head.dtype == torch.float32
    check(path, adapter(tmp_path / "a", path, {HEAD: head.bfloat16()}))
    with pytest.raises(CheckpointError, match="differs"):
        check(path, adapter(tmp_path / "b", path, {HEAD: head.bfloat16().float()}))


def _one_more(head: torch.Tensor) -> torch.Tensor:
    head = head.clone()
    head[-1, -1] += 1
    return head


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (HEAD, _one_more, "lm_head.base_layer.weight differs from the model's tensor"),
        (EMBEDDINGS, _one_more, "embed_tokens.weight differs from the model's tensor"),
        (HEAD, lambda head: head[:-1], "differs"),
        (HEAD, lambda head: torch.cat([head, head[:3]]), "differs"),
        (HEAD, lambda head: head.to(torch.int8), "differs"),
        (HEAD, lambda head: torch.full_like(head, float("nan")), "differs"),
        (HEAD.replace("weight", "bias"), lambda head: head[:, 0], "nor of the model"),
        (f"{PREFIX}model.other.base_layer.weight", _one_more, "nor of the model"),
    ],
)
def test_other_tensors_are_refused_by_name(
    tmp_path: Path,
    model: Path,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    words: str,
) -> None:
    folder = adapter(tmp_path, model, {name: change(head_of(model))})
    with pytest.raises(CheckpointError) as caught:
        check(model, folder)
    assert words in str(caught.value)
    assert name in str(caught.value)


def test_any_projection_may_have_its_own_weight_beside_it(tmp_path: Path, model: Path) -> None:
    name, own = next((n, t) for n, t in weights(model).items() if n.endswith("q_proj.weight"))
    copied = f"{PREFIX}{name.removesuffix('.weight')}.base_layer.weight"
    check(model, adapter(tmp_path / "a", model, {copied: own}))
    with pytest.raises(CheckpointError, match=r"q_proj\.base_layer\.weight differs"):
        check(model, adapter(tmp_path / "b", model, {copied: own + 1}))


def test_a_quantised_tensor_cannot_be_compared(tmp_path: Path) -> None:
    path = make_checkpoint(
        tmp_path / "codes", dataclasses.replace(SPECS["dense"], quantization="fp8")
    )
    name = next(n for n in weights(path) if n.endswith("up_proj.weight_scale_inv"))
    copied = f"{PREFIX}{name.removesuffix('weight_scale_inv')}base_layer.weight"
    plain = make_checkpoint(tmp_path / "plain", SPECS["dense"])
    folder = adapter(tmp_path / "a", plain, {copied: torch.zeros(4, 4)})
    with pytest.raises(CheckpointError, match=r"quantised: save the adapter without it"):
        check(path, folder)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_the_head_of_a_gguf_file(tmp_path: Path, kind: Kind) -> None:
    path = make_checkpoint(tmp_path / "plain", CheckpointSpec(vision_depth=0, **WIDE))
    file = write_model(path, tmp_path / "model.gguf", blocks(kind))
    folder = adapter(tmp_path / "a", path, {HEAD: head_of(path)})
    made = resolve_checkpoint(str(file))
    if kind is Kind.F32:
        check(made, folder)
        return
    with pytest.raises(CheckpointError, match=r"lm_head\.base_layer\.weight .* quantised"):
        check(made, folder)


def test_an_engine_compares_before_it_serves(tmp_path: Path, model: Path) -> None:
    config = EngineConfig(device="cpu", dtype="float32", cache_memory="32MiB")
    right = adapter(tmp_path / "right", model, {HEAD: head_of(model)}, "lm_head")
    wrong = adapter(tmp_path / "wrong", model, {HEAD: _one_more(head_of(model))}, "lm_head")
    with Pipeline(model, dataclasses.replace(config, lora_modules=(f"right={right}",))) as pipe:
        store = pipe.engine.adapters
        assert store.find("right") is not None
        with pytest.raises(CheckpointError, match="differs from the model's tensor"):
            store.load(LoRA("wrong", wrong))
    options = dataclasses.replace(config, lora_modules=(f"wrong={wrong}",))
    with pytest.raises(CheckpointError, match="lora_modules, wrong: .* differs from the model's"):
        Pipeline(model, options)
