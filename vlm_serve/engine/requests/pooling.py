"""Engines that make vectors of prompts instead of answers (`--task embed`, `--task rerank` and
`--task classify`): embeddings, scores and labels."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vlm_serve.errors import ConfigError, InvalidRequestError
from vlm_serve.models.classifier import Classifier as Classifier
from vlm_serve.models.spec import ModelSpec
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.sampling_params import SamplingParams

JUDGEMENTS = ("yes", "no")
"""The tokens whose logits a reranker compares."""
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""A request for a prompt's vector; its token means nothing."""
Vector = npt.NDArray[np.float32]
_SMALLEST = 1e-12


def telling(tokens: tuple[int, ...]) -> SamplingParams:
    """Return a request for the log-probabilities of tokens that may come next."""
    return replace(ONE_TOKEN, logprobs=0, logprob_token_ids=tokens)


def pools(config: EngineConfig) -> bool:
    """Return True if the engine makes vectors."""
    return config.task != "generate"


def with_task(config: EngineConfig, spec: ModelSpec) -> EngineConfig:
    """Return the config with the task that a model has: an engine that pools drafts nothing.

    Raises:
        ConfigError: the model has no head for it, or it cannot be combined with other options.
    """
    labels, task = spec.classifier is not None, config.task
    if task == ("generate" if labels else "classify"):
        kind = "a classifier, which generates no answers" if labels else "no classifier"
        named = f"the checkpoint's architectures {spec.config.get('architectures')} name {kind}"
        raise ConfigError(f"task {task!r}: {named}; leave it out", param="task")
    if task == "auto" or (task == "rerank" and labels):
        config = replace(config, task="classify" if labels else "generate")
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


def pooled_tokens(
    config: EngineConfig, spec: ModelSpec, path: Path
) -> tuple[int, ...] | int | None:
    """Return `Model.pooled` for the engine's task.

    Raises:
        CheckpointError: the tokenizer has no single tokens for yes and no.
    """
    if not pools(config):
        return None
    if config.task == "embed":
        return ()
    if spec.classifier is not None:
        return len(spec.classifier.labels)
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


def head_rows(config: EngineConfig, spec: ModelSpec) -> int | None:
    """Return `weight_bytes`'s `head_rows` for the engine's task."""
    labels = 0 if spec.classifier is None else len(spec.classifier.labels)
    return {"embed": 0, "rerank": len(JUDGEMENTS), "classify": labels}.get(config.task)


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


def embedding_of(hidden: Vector, dimensions: int | None = None, *, unit: bool = True) -> Vector:
    """Return a hidden state, cut to its first dimensions, with a length of 1 if `unit`."""
    cut = hidden if dimensions is None else hidden[:dimensions]
    length = float(np.linalg.norm(cut.astype(np.float64))) if unit else 1.0
    return (cut / max(length, _SMALLEST)).astype(np.float32)


def scoring(spec: ModelSpec, activated: bool | None = None) -> Callable[[Vector], float]:
    """Return `score_of` for a model. Raises InvalidRequestError if it has several labels."""
    head = spec.classifier
    if head is not None and len(head.labels) != 1:
        raise InvalidRequestError(f"the model has {len(head.labels)} labels: use /classify")
    return partial(score_of, head=head, activated=activated is not False)


def score_of(logits: Vector, head: Classifier | None = None, *, activated: bool = True) -> float:
    """Return the probability of yes, from the logits of yes and no, or the value of a classifier's
    only label; unless `activated`, the number behind it."""
    if head is not None:
        return head.values(logits, activated=activated)[0]
    yes, no = (float(logit) for logit in logits)
    return 1.0 / (1.0 + math.exp(min(no - yes, 700.0))) if activated else yes - no
