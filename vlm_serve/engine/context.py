"""The context of an engine, and what its options change in a checkpoint's config.json."""

from __future__ import annotations

import json

from vlm_serve.engine.memory import MemoryPlan
from vlm_serve.errors import ConfigError
from vlm_serve.models import ModelSpec
from vlm_serve.models.config import Changes
from vlm_serve.options.config import EngineConfig

CARDS_FACTOR = 4
"""The largest YaRN factor that the model cards of Qwen3, Qwen3-VL, Qwen3-Next and Qwen3.5 name."""


def longest_context(config: EngineConfig, model: ModelSpec, memory: MemoryPlan) -> int:
    """Return the maximum number of tokens of a prompt with its answer.

    Raises:
        ConfigError: `max_model_len` exceeds the model's context, and that is not allowed.
    """
    context, most = config.max_model_len, model.max_position_embeddings
    if context is not None and context > most and not config.allow_long_max_model_len:
        raise ConfigError(
            f"max_model_len is {context}, but this checkpoint is made for {most} tokens: lower it, "
            f"{_longer(model, context)}, or pass --allow-long-max-model-len",
            param="max_model_len",
        )
    context = context or most
    return min(context, (memory.num_blocks - 1) * memory.block_size)


def _longer(model: ModelSpec, context: int) -> str:
    """Return the advice by which YaRN extends a model to a context, or how far it goes."""
    yarn = model.rope.yarn
    original = model.max_position_embeddings if yarn is None else yarn.original
    factor = -(-context // original)
    fields = {"factor": float(factor), "original_max_position_embeddings": original}
    if factor > CARDS_FACTOR:
        reach = CARDS_FACTOR * original
        return f"to at most {reach} with YaRN (model cards go to a factor of {CARDS_FACTOR})"
    return f"extend it by --rope-scaling '{json.dumps({'rope_type': 'yarn'} | fields)}'"


def changes_of(config: EngineConfig) -> Changes:
    """Return the changes of config.json that the options ask for."""
    return Changes(config.hf_overrides or {}, config.rope_scaling or {})
