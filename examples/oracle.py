"""transformers as the oracle: the processor and the model of a checkpoint, loaded unchanged.

torchvision's wheel from PyPI is built for torch with CUDA, and loads beside it, with and without a
GPU. Beside a CPU build its compiled ops do not load. They are needed only where they are called,
and importing it takes no more than their schemas, so those are defined here then.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

_TORCHVISION_OPS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input) -> Tensor",
    "_roi_align_backward(Tensor grad) -> Tensor",
    "roi_pool(Tensor input) -> (Tensor, Tensor)",
    "_roi_pool_backward(Tensor grad) -> Tensor",
    "ps_roi_align(Tensor input) -> (Tensor, Tensor)",
    "_ps_roi_align_backward(Tensor grad) -> Tensor",
    "ps_roi_pool(Tensor input) -> (Tensor, Tensor)",
    "_ps_roi_pool_backward(Tensor grad) -> Tensor",
    "deform_conv2d(Tensor input) -> Tensor",
    "_deform_conv2d_backward(Tensor grad) -> Tensor",
)


NO_TOKEN = 1 << 40
"""An end token that no model produces: generation runs to its length."""


@cache
def prepare_torchvision() -> torch.library.Library | None:
    """Make `import torchvision` possible; None where it is missing or its compiled ops load.

    Loading them is the only test that counts: where schemas are defined by hand and the compiled
    ops load afterwards, torch ends the process.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    for compiled in Path(spec.origin).parent.glob("_C*.so"):
        with suppress(OSError):
            torch.ops.load_library(str(compiled))  # type: ignore[no-untyped-call]
            return None
    # The caller must keep the library: its definitions go when it is collected. `cache` does.
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for schema in _TORCHVISION_OPS:
        library.define(schema)  # type: ignore[no-untyped-call]
    return library


@cache
def processor(path: Path | str) -> Any:
    """transformers' processor of a checkpoint."""
    prepare_torchvision()
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(str(path))


@cache
def tokenizer(path: Path | str, **names: str) -> Any:
    """transformers' tokenizer of a checkpoint, with other names of special tokens, if given."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(path), **names)


@contextmanager
def _without_fla() -> Iterator[None]:
    """Hide the package fla while transformers imports the code of a model.

    transformers takes fla's kernels wherever that package is installed, and they need a GPU.
    """
    absent = object()
    earlier: Any = sys.modules.get("fla", absent)
    sys.modules["fla"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if earlier is absent:
            del sys.modules["fla"]
        else:
            sys.modules["fla"] = earlier


@cache
def prepare_models() -> None:
    """Make transformers' models usable; call it before anything imports their code.

    A model's code takes fla's kernels when it is first imported, and keeps them.
    """
    prepare_torchvision()
    with _without_fla():
        for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
            with suppress(ImportError):  # not every transformers has each of them
                importlib.import_module(f"transformers.models.{name}.modeling_{name}")


@cache
def model(path: Path | str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model of a checkpoint, in evaluation mode, with SDPA attention on the CPU."""
    prepare_models()
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(str(path))
    config = getattr(config, "thinker_config", config)  # of a model that speaks as well
    loader = (
        AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    )
    with _without_fla():  # for models whose code is imported only now
        return loader.from_pretrained(
            str(path), config=config, dtype=dtype, attn_implementation="sdpa"
        ).eval()


@torch.no_grad()
def greedy(path: Path | str, inputs: dict[str, torch.Tensor], num_tokens: int) -> list[int]:
    """Token ids that transformers generates greedily, not stopping at an end token."""
    # `min_new_tokens` would not do: it forbids the end tokens.
    output = model(path).generate(
        **inputs, max_new_tokens=num_tokens, do_sample=False, eos_token_id=NO_TOKEN
    )
    return [int(token) for token in output[0, inputs["input_ids"].shape[1] :]]


@torch.no_grad()
def logits(path: Path | str, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """float32 `[tokens, vocab]` logits of every position of one prompt, computed in one forward."""
    return torch.as_tensor(model(path)(**inputs, use_cache=False).logits[0]).float()
