"""Engines that make vectors of prompts instead of answers (`--task embed` and `--task rerank`):
embeddings and scores."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vlm_serve.errors import ConfigError, InvalidRequestError
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.sampling_params import SamplingParams

JUDGEMENTS = ("yes", "no")
"""The tokens whose logits a reranker compares."""
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""A request for a prompt's vector; its token means nothing."""
Vector = npt.NDArray[np.float32]
_SMALLEST = 1e-12


def pools(config: EngineConfig) -> bool:
    """Return True if the engine makes vectors."""
    return config.task != "generate"


def without_drafts(config: EngineConfig) -> EngineConfig:
    """Return the config for its task: an engine that pools drafts nothing.

    Raises:
        ConfigError: it cannot be combined with other options.
    """
    if not pools(config):
        return config
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"task {config.task!r} runs on one rank: leave tensor_parallel_size at 1",
            param="task",
        )
    if config.speculative not in ("auto", "off"):
        raise ConfigError(
            f"task {config.task!r} makes no tokens to draft: leave speculative off", param="task"
        )
    return replace(config, speculative="off")


def pooled_tokens(config: EngineConfig, path: Path) -> tuple[int, ...] | None:
    """Return `Model.pooled` for the engine's task.

    Raises:
        CheckpointError: the tokenizer has no single tokens for yes and no.
    """
    if not pools(config):
        return None
    if config.task == "embed":
        return ()
    tokenizer, token_ids = Tokenizer(path), []
    for word in JUDGEMENTS:
        ids = tokenizer.encode(word)
        if len(ids) != 1:
            raise ConfigError(
                f"task 'rerank' needs a token for {word!r}, which this checkpoint has not",
                param="task",
            )
        token_ids += ids
    return tuple(token_ids)


def head_rows(config: EngineConfig) -> int | None:
    """Return `weight_bytes`'s `head_rows` for the engine's task."""
    return {"embed": 0, "rerank": len(JUDGEMENTS)}.get(config.task)


def check_task(config: EngineConfig, *, pooled: bool) -> None:
    """Raise InvalidRequestError if the engine does not do what a request wants."""
    if pooled and not pools(config):
        raise InvalidRequestError(
            "this server generates answers: start another one with --task embed or --task rerank"
        )
    if pools(config) and not pooled:
        raise InvalidRequestError(
            f"this server generates no answers: it was started with --task {config.task}"
        )


def embedding_of(hidden: Vector, dimensions: int | None = None) -> Vector:
    """Return a hidden state, cut to its first dimensions, with a length of 1."""
    cut = hidden if dimensions is None else hidden[:dimensions]
    length = float(np.linalg.norm(cut.astype(np.float64)))
    return (cut / max(length, _SMALLEST)).astype(np.float32)


def score_of(logits: Vector) -> float:
    """Return the probability of yes, from the logits of yes and no."""
    yes, no = (float(logit) for logit in logits)
    return 1.0 / (1.0 + math.exp(min(no - yes, 700.0)))
