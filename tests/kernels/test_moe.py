"""Router and routed experts on the CPU: against transformers, the reference, and bit by bit."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from kernel_case import modeling, randn
from kernel_oracles import routed_experts_reference
from triton_case import assert_near

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.linear import Linear, dense
from vlm_serve.kernels.moe import route, routed_experts
from vlm_serve.kernels.moe.reference import Sigmoids

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 3e-6, torch.float16: 5e-3, torch.bfloat16: 3e-2}
EXPERTS, TOP_K, HIDDEN, SIZE = 16, 4, 48, 24


def expert_weights(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    gate_up = randn(EXPERTS, 2 * SIZE, HIDDEN) / HIDDEN**0.5
    return gate_up.to(dtype), (randn(EXPERTS, HIDDEN, SIZE, seed=1) / SIZE**0.5).to(dtype)


def apart(weight: torch.Tensor, parts: int = 1) -> list[Linear]:
    """One projection per expert and part."""
    return [dense(part) for expert in weight for part in expert.chunk(parts)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [1, 33])
def test_router_equals_transformers(dtype: torch.dtype, tokens: int) -> None:
    x = randn(tokens, HIDDEN, dtype=dtype)
    router = modeling().Qwen3_5MoeTopKRouter(
        SimpleNamespace(num_experts_per_tok=TOP_K, num_experts=EXPERTS, hidden_size=HIDDEN)
    )
    router.weight.data = randn(EXPERTS, HIDDEN, dtype=dtype)
    logits, weights, ids = router(x)
    got_weights, got_ids = route(logits.detach(), TOP_K)
    assert torch.equal(got_ids, ids) and torch.equal(got_weights, weights.detach())
    assert got_weights.dtype == dtype


@pytest.mark.parametrize("biased", [False, True])
def test_sigmoids_choose_as_transformers(biased: bool) -> None:
    from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter

    config = SimpleNamespace(
        num_experts_per_tok=TOP_K,
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        use_expert_bias=biased,
    )
    router, x = Lfm2MoeTopKRouter(config), randn(33, HIDDEN)
    router.weight.data = randn(EXPERTS, HIDDEN)
    bias = randn(EXPERTS, seed=2) if biased else None
    logits, weights, ids = router(x, bias)
    got_weights, got_ids = route(logits.detach(), TOP_K, Sigmoids(bias, 1.5))
    assert torch.equal(got_ids, ids)
    assert_near(got_weights, weights.detach(), 1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [0, 1, 3, 50])
@pytest.mark.parametrize("packed", [False, True])
def test_experts_equal_transformers(dtype: torch.dtype, tokens: int, packed: bool) -> None:
    x, (gate_up, down) = randn(tokens, HIDDEN, dtype=dtype), expert_weights(dtype)
    weights, ids = route(randn(tokens, EXPERTS, dtype=dtype, seed=3), TOP_K)
    if packed:
        out = routed_experts(x, weights, ids, apart(gate_up, 2), apart(down))
    else:
        out = routed_experts(x, weights, ids, gate_up, down)
    assert out.dtype == dtype and out.shape == x.shape
    assert_near(out, routed_experts_reference(x, weights, ids, gate_up, down), TOLERANCE[dtype])
    config = SimpleNamespace(
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        moe_intermediate_size=SIZE,
        hidden_act="silu",
        _experts_implementation="eager",
    )
    module = modeling().Qwen3_5MoeExperts(config)
    module.gate_up_proj.data, module.down_proj.data = gate_up, down
    assert_near(out, module(x, ids, weights).detach(), 2 * TOLERANCE[dtype])


def test_sigmoids_choose_as_nemotron_h() -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHTopkRouter

    config = SimpleNamespace(
        num_experts_per_tok=TOP_K,
        num_local_experts=EXPERTS,
        hidden_size=HIDDEN,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        n_group=1,
        topk_group=1,
    )
    router, x = NemotronHTopkRouter(config), randn(33, HIDDEN)
    router.weight.data = 8 * randn(EXPERTS, HIDDEN) - 1
    router.e_score_correction_bias = randn(EXPERTS, seed=2)
    logits, weights, ids = router(x)
    sigmoids = Sigmoids(router.e_score_correction_bias, 2.5, 1e-20)
    got_weights, got_ids = route(logits.detach(), TOP_K, sigmoids)
    places, expected = ids.argsort(dim=-1), got_ids.argsort(dim=-1)
    assert torch.equal(ids.gather(1, places), got_ids.gather(1, expected))
    assert_near(got_weights.gather(1, expected), weights.detach().gather(1, places), 1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_experts_without_gates_equal_transformers(packed: bool) -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    config = SimpleNamespace(
        n_routed_experts=EXPERTS,
        hidden_size=HIDDEN,
        moe_intermediate_size=SIZE,
        moe_latent_size=None,
        mlp_hidden_act="relu2",
        _experts_implementation="eager",
    )
    x, (gate_up, down) = randn(33, HIDDEN), expert_weights()
    up = gate_up[:, :SIZE].contiguous()
    weights, ids = route(randn(33, EXPERTS, seed=3), TOP_K)
    module = NemotronHExperts(config)
    module.up_proj.data, module.down_proj.data = up, down
    parts = (apart(up), apart(down)) if packed else (up, down)
    out = routed_experts(x, weights, ids, *parts)
    assert_near(out, module(x, ids, weights).detach(), TOLERANCE[torch.float32])


@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_deterministic_tokens_have_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    rng = random.Random(0)
    gate_up, down = expert_weights(dtype)
    experts = apart(gate_up, 2), apart(down)
    x = randn(120, HIDDEN, dtype=dtype)
    weights, ids = route(randn(120, EXPERTS, dtype=dtype, seed=3), TOP_K)
    whole = routed_experts(x, weights, ids, *experts, deterministic=True)
    for _ in range(40):
        some = torch.tensor(rng.sample(range(120), rng.randint(1, 60)))
        out = routed_experts(x[some], weights[some], ids[some], *experts, deterministic=True)
        assert torch.equal(out, whole[some])


def test_an_unused_expert_is_never_read() -> None:
    gate_up, down = expert_weights()
    gate_up[5:], down[5:] = float("nan"), float("nan")
    ids = torch.tensor([[0, 4], [3, 1], [0, 3]])
    out = routed_experts(randn(3, HIDDEN), torch.full((3, 2), 0.5), ids, gate_up, down)
    assert not out.isnan().any()


def test_bad_arguments_are_named() -> None:
    x, (gate_up, down) = randn(3, HIDDEN), expert_weights()
    weights, ids = route(randn(3, EXPERTS), TOP_K)
    packed = apart(gate_up, 2)
    for name, arguments in {
        "weights": (x, weights.half(), ids, gate_up, down),
        "ids": (x, weights, ids.int(), gate_up, down),
        "gate_up": (x, weights, ids, gate_up[:, :, :5], down),
        "down": (x, weights, ids, gate_up, down[:3]),
    }.items():
        with pytest.raises(KernelArgumentError, match=name) as error:
            routed_experts(*arguments)
        assert error.value.argument == name
    with pytest.raises(KernelArgumentError, match="down"):
        routed_experts(x, weights, ids, packed, down)
    with pytest.raises(KernelArgumentError, match="gate_up"):
        routed_experts(x, weights, ids, packed[:4], apart(down))
    with pytest.raises(KernelArgumentError, match="top_k"):
        route(randn(3, 4), 5)
