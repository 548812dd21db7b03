"""Pools as they lie in memory, and as they are stored."""

from __future__ import annotations

import torch

from vlm_serve.cache.tiers.entry import Kind
from vlm_serve.engine.core.media_tiers import to_bytes
from vlm_serve.engine.steps.tier_transfer import TensorTransfer
from vlm_serve.models.cache_layout import CacheLayout, CacheTensors, Pool
from vlm_serve.models.parts.attention import Attention

BLOCK, HEADS, DIM = 16, 2, 32


def pools() -> CacheTensors:
    attention = Attention(heads=4, kv_heads=HEADS, head_dim=DIM)
    layout = CacheLayout.of([attention.pools()] * 3)
    return layout.allocate(5, 0, BLOCK, {"kv": torch.bfloat16})


def test_on_a_cpu_the_tokens_of_a_head_lie_next_to_each_other() -> None:
    pool = pools()["kv"]
    assert pool.shape == (5, 3, 2, BLOCK, HEADS, DIM)
    block, layer, part, token, head, dim = pool.stride()
    assert (dim, token, head) == (1, DIM, BLOCK * DIM)
    assert (part, layer, block) == (HEADS * head, 2 * part, 3 * layer)


def test_how_they_lie_does_not_change_what_is_stored() -> None:
    caches = pools()
    content = torch.randn(3, 2, BLOCK, HEADS, DIM).bfloat16()
    caches["kv"][1] = content
    transfer = TensorTransfer(caches)
    for tokens in (BLOCK, 7):
        stored = transfer.read_kv(1, tokens)
        assert stored == to_bytes((content[:, :, :tokens].clone(),))
        assert len(stored) == transfer.num_bytes(Kind.KV, tokens)


def test_a_rank_has_its_part_of_each_kind_of_head() -> None:
    """Each rank has its part of 8 heads of 32, and of 2 of 16 twice, which four ranks repeat."""
    pool = Pool("conv", "inputs", "row", (320, 3), split=0, heads=((8, 32), (2, 16), (2, 16)))
    assert [pool.of_rank(ranks).entry for ranks in (1, 2, 4)] == [(320, 3), (160, 3), (96, 3)]
