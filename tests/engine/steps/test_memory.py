"""How the cache's memory is divided between blocks and rows of states."""

from __future__ import annotations

import pytest
import torch

from vlm_serve.engine.numerics.arithmetic import Types
from vlm_serve.engine.steps.memory import MemoryPlan, plan_memory
from vlm_serve.models.cache_layout import CacheLayout
from vlm_serve.models.parts.attention import Attention
from vlm_serve.models.parts.base import Mixer
from vlm_serve.models.parts.gated_delta import GatedDelta
from vlm_serve.models.parts.short_conv import ShortConv
from vlm_serve.options.config import EngineConfig

HALF = torch.bfloat16
BFLOAT16 = Types(HALF, HALF, HALF, torch.float32, HALF, HALF)
ATTENTION = Attention(heads=32, kv_heads=8, head_dim=64, gated=False)
GIB = 1 << 30


def planned(*mixers: Mixer, block_size: int = 64) -> MemoryPlan:
    layout = CacheLayout.of([mixer.pools() for mixer in mixers])
    return plan_memory(layout, EngineConfig(block_size=block_size), BFLOAT16, GIB)


@pytest.mark.parametrize("block_size", [16, 64])
def test_small_states_get_a_row_a_block(block_size: int) -> None:
    """Sizes of LFM2 1.2B: a row is 82 kB, a block of 64 tokens 786 kB."""
    plan = planned(*[ATTENTION] * 6, *[ShortConv(2048, 3)] * 10, block_size=block_size)
    alone = planned(*[ATTENTION] * 6, block_size=block_size)
    assert plan.snapshot_bytes == 10 * 2048 * 2 * 2
    assert plan.num_blocks - 1 <= plan.num_snapshot_rows <= plan.num_blocks
    share = plan.block_bytes / (plan.block_bytes + plan.snapshot_bytes)
    assert plan.tokens == pytest.approx(share * alone.tokens, rel=0.01)
    if block_size == 64:
        assert plan.tokens > 0.9 * alone.tokens


def test_large_states_get_half_of_the_memory() -> None:
    delta = GatedDelta(key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4)
    plan = planned(*[ATTENTION] * 8, *[delta] * 24)
    assert plan.num_snapshot_rows == GIB // 2 // plan.snapshot_bytes
    assert plan.num_snapshot_rows < plan.num_blocks
