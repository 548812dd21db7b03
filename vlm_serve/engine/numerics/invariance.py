"""Batch invariance: what an engine promises about the bits of its answers, and why.

docs/architecture.md#batch-invariance
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Literal

import torch

from vlm_serve.engine.numerics.dependence import USUAL, Part, blamed
from vlm_serve.errors import ConfigError
from vlm_serve.kernels.tuning import fixed_steps
from vlm_serve.options.config import EngineConfig

Reach = Literal["answers", "prompts", "none"]


@dataclass(frozen=True, slots=True)
class Promise:
    """What does not depend on batches, cache hits, chunk sizes, preemption and neighbours.

    Attributes:
        reach: tokens and log-probabilities of whole answers; the logits behind a prompt; nothing.
        reason: why, in a clause.
        blamed: what gives the rows of a prompt other bits in other company, see `dependence`; on a
            GPU alone. Hits of prompts are exact if there is none.
    """

    reach: Reach = "none"
    reason: str = ""
    blamed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.reach}: {self.reason}"


def promise(
    device: torch.device, *, compiled: bool, wanted: bool, parts: Set[Part] = USUAL
) -> Promise:
    """Return the promise of an engine.

    Args:
        device: of the computation.
        compiled: compiled CPU kernels compute.
        wanted: the option `deterministic` is on.
        parts: of the model and its options; by default weights are plain, and there is no more.
    """
    if compiled:
        return Promise("answers", "by construction, compiled kernels have one arithmetic per row")
    if device.type != "cpu":
        found = list(blamed(parts, fixed=wanted or fixed_steps(device)))
        # No step computes pictures: only the option fixes theirs.
        found += [name for name in blamed(parts & {"tower"}, fixed=wanted) if name not in found]
        return _on_a_gpu(tuple(found), wanted=wanted)
    if not wanted:
        return Promise("none", "torch's products follow the batch; see batch_invariant")
    return Promise("prompts", "torch may round a decoded token by its place in a step")


def _on_a_gpu(to_blame: tuple[str, ...], *, wanted: bool) -> Promise:
    if to_blame:
        reason = f"a prompt's rows follow their batch in {', '.join(to_blame)}"
        return Promise("none", reason if wanted else f"{reason}; see batch_invariant", to_blame)
    if wanted:
        return Promise("answers", "fixed tiles in every step, only prefill's entries are reused")
    return Promise("prompts", "no op on a prompt's way looks at its batch")


def exact_only(config: EngineConfig, *, compiled: bool) -> bool:
    """Return True if prompts must come from prefill alone and answers from decode steps.

    Compiled kernels prefill and decode with equal bits. Others do not, which shows as soon as
    either reuses what the other has left.
    """
    return config.deterministic and not compiled


def check_options(config: EngineConfig, *, compiled: bool) -> None:
    """Raise ConfigError for an option without a place in this mode; it names the option."""
    if not exact_only(config, compiled=compiled):
        return
    where = "with batch_invariant and without compiled kernels"
    if config.speculative not in ("auto", "off"):
        raise ConfigError(
            f"speculative must be off {where}, got {config.speculative!r}: drafts are verified by "
            "another kernel than the one that decodes",
            param="speculative",
        )
    if config.prefix_cache_decode_state_interval:
        raise ConfigError(
            f"prefix_cache_decode_state_interval must be 0 {where}: states that decoding has left "
            "are not reused there",
            param="prefix_cache_decode_state_interval",
        )
    if config.prefix_cache_answer_ends == "always":
        raise ConfigError(
            f"prefix_cache_answer_ends cannot be always {where}: what decoding has left is not "
            "reused there",
            param="prefix_cache_answer_ends",
        )
