"""Engines whose weights change, and what they answer: tokens with their log-probabilities."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from checkpoint_spec import CheckpointSpec
from conversation import say
from make_checkpoint import make_checkpoint
from safetensors.torch import load_file, save_file

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.requests.outputs import CacheReport, Delta
from vlm_serve.options.config import EngineConfig
from vlm_serve.sampling_params import SamplingParams

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "block_size": 16,
    "cache_memory": "16MiB",
    "speculative": "off",
}
TEXT = "Tell me about the river, its boats, the people on them and what they carry to the sea. " * 2
LONG = 400
"""Tokens of an answer that an update surely finds running: it reads the weights first."""


class Answer:
    """Gathers one answer."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.done = threading.Event()

    def push(self, delta: Delta) -> None:
        self.deltas.append(delta)
        if delta.finish_reason is not None:
            self.done.set()

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas for token in delta.token_ids)

    @property
    def bits(self) -> list[Any]:
        """Tokens with their log-probabilities."""
        return [(delta.token_ids, delta.logprobs) for delta in self.deltas if delta.token_ids]

    @property
    def report(self) -> CacheReport:
        report = self.deltas[-1].cache_report
        assert report is not None
        return report


def begin(engine: Engine, content: Any = TEXT, tokens: int = 8, **fields: Any) -> Answer:
    forced = fields.pop("forced", ())
    answer, prompt = Answer(), fields.pop("prompt", None)
    prompt = prompt or engine.preprocessor.prepare([say(content)])
    params = SamplingParams(
        max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=3, **fields
    )
    engine.submit(prompt, params, answer.push, forced=forced)
    return answer


def ask(engine: Engine, content: Any = TEXT, tokens: int = 8, **fields: Any) -> Answer:
    answer = begin(engine, content, tokens, **fields)
    assert answer.done.wait(120)
    return answer


def started(path: Path, **options: Any) -> Engine:
    return Engine.from_checkpoint(str(path), EngineConfig(**OPTIONS | options))


def changing(path: Path, **options: Any) -> Engine:
    return started(path, allow_weight_updates=True, **options)


def digest_of(engine: Engine) -> str:
    assert engine.preprocessor.weights is not None
    return engine.preprocessor.weights.whole.hex()


def both(spec: CheckpointSpec, root: Path) -> list[Path]:
    first = make_checkpoint(root / "first", spec)
    second = make_checkpoint(root / "second", replace(spec, seed=spec.seed + 100))
    for file in first.iterdir():  # the tokenizer has a seed too
        if file.suffix != ".safetensors":
            shutil.copy(file, second)
    return [first, second]


def with_tensors(source: Path, target: Path, changed: dict[str, torch.Tensor]) -> Path:
    shutil.copytree(source, target)
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: changed.get(name, tensors[name]) for name in tensors}, file)
    return target


def tensors_of(path: Path, *ends: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        found |= {name: each for name, each in load_file(file).items() if name.endswith(ends)}
    assert found
    return found
