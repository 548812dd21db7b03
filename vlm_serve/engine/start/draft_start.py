"""Start-up decisions about drafts: sources and costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from vlm_serve.engine.features.drafts.base import Drafter, MtpDrafter
from vlm_serve.engine.features.drafts.lengths import CostCurve
from vlm_serve.engine.features.drafts.suffix import SuffixDrafter
from vlm_serve.engine.steps.local_executor import LocalExecutor
from vlm_serve.errors import ConfigError
from vlm_serve.models import ModelSpec
from vlm_serve.options.config import EngineConfig


def with_drafts(config: EngineConfig, device: torch.device, *, compiled: bool) -> EngineConfig:
    """Resolve "auto": enable drafts where measurements show that they cost next to nothing."""
    if config.speculative != "auto":
        return config
    why = why_off(device, config.tensor_parallel_size, compiled=compiled)
    return replace(config, speculative="off" if why else "suffix")


def why_off(device: torch.device, ranks: int, *, compiled: bool) -> str:
    """Return the reason why drafts are off by default; empty if they are on."""
    if device.type != "cpu":
        return "their benefit on GPUs has not been measured"
    if not compiled:
        return "without compiled kernels a token's bits depend on the rows beside it"
    return "their benefit on several ranks has not been measured" if ranks > 1 else ""


def with_mtp(config: EngineConfig, model: ModelSpec) -> bool:
    """Return True if the model's MTP layer is used.

    Raises:
        ConfigError: the layer is requested but missing, or combined with several ranks.
    """
    if "mtp" not in config.speculative:
        return False
    if model.mtp is None:
        raise ConfigError(
            f"speculative is {config.speculative!r}, but the checkpoint's config has no "
            "mtp_num_hidden_layers of 1",
            param="speculative",
        )
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"speculative {config.speculative!r} cannot run on several ranks: its drafts depend "
            "on tokens that only the first rank knows",
            param="speculative",
        )
    return True


def make_drafters(config: EngineConfig) -> list[Drafter]:
    """Create the drafters that the options name."""
    kinds: dict[str, Callable[[], Drafter]] = {"suffix": SuffixDrafter, "mtp": MtpDrafter}
    return [make() for name, make in kinds.items() if name in config.speculative.split(",")]


def measure_costs(
    executor: LocalExecutor, config: EngineConfig
) -> tuple[CostCurve, CostCurve | None]:
    """Measure the cost of a step's rows, and of passes of the MTP layer if the model has one."""
    most = config.max_num_seqs
    tokens = config.speculative_tokens + 1
    rows, sequence = executor.measure(most_sequences=most, most_tokens=tokens)
    passes = executor.measure_passes(most_sequences=most)
    plain = executor.measure_plain(most_sequences=most)
    costs = CostCurve(rows, sequence=sequence, tokens=tokens, plain=plain)
    return costs, CostCurve(passes) if passes is not None else None
