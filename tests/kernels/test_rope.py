"""M-RoPE with the query/key norm: against transformers' modules and the float64 reference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kernel_case import EPS, modeling, randn
from kernel_oracles import qk_norm_rope_reference
from triton_case import assert_near

from vlm_serve.kernels.checks import KernelArgumentError
from vlm_serve.kernels.rope import Rotation, mrope_cos_sin, qk_norm_rope

pytestmark = pytest.mark.usefixtures("cpu_path")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LAYOUTS = (
    (64, 0.25, (4, 2, 2)),
    (256, 0.25, (11, 11, 10)),
    (48, 0.5, (4, 4, 4)),
    (32, 1.0, (8, 4, 4)),
)


def rotary(dim: int, fraction: float, sections: tuple[int, int, int]) -> torch.nn.Module:
    config = SimpleNamespace(
        max_position_embeddings=4096,
        head_dim=dim,
        hidden_size=dim,
        num_attention_heads=1,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": fraction,
            "mrope_section": list(sections),
        },
    )
    module: torch.nn.Module = modeling().Qwen3_5MoeTextRotaryEmbedding(config)
    return module


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("dim", "fraction", "sections"), LAYOUTS)
def test_equals_transformers(
    dtype: torch.dtype, dim: int, fraction: float, sections: tuple[int, int, int]
) -> None:
    tokens, heads = 9, (4, 2)
    positions = torch.randint(0, 3000, (3, tokens), generator=torch.Generator().manual_seed(1))
    embedding = rotary(dim, fraction, sections)
    inv_freq = embedding.get_buffer("inv_freq")
    cos, sin = mrope_cos_sin(positions, inv_freq, sections)
    fused = randn(tokens, heads[0], 2 * dim, dtype=dtype)
    q, k = fused[..., :dim], randn(tokens, heads[1], dim, dtype=dtype, seed=1)
    weights = [randn(dim, seed=2) * 0.3, randn(dim, seed=3) * 0.3]
    results = qk_norm_rope(q, k, Rotation(weights[0], weights[1], cos, sin, EPS))
    wide = embedding(q.float(), positions[:, None])
    for x, weight, result in zip((q, k), weights, results, strict=True):
        norm = modeling().Qwen3_5MoeRMSNorm(dim, eps=EPS)
        norm.weight.data = weight
        normed = norm(x.float()).detach().transpose(0, 1)[None]
        rotated, _ = modeling().apply_rotary_pos_emb(normed, normed, *wide)
        assert result.dtype == dtype and result.is_contiguous()
        assert_near(result, rotated[0].transpose(0, 1), TOLERANCE[dtype])
        reference = qk_norm_rope_reference(x, weight, cos, sin, EPS)
        assert_near(result, reference, TOLERANCE[dtype])


def test_axes_with_runs_of_their_own_equal_transformers() -> None:
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as modeling

    rotation = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    sizes = {"max_position_embeddings": 4096, "head_dim": 128}
    config = SimpleNamespace(**sizes, rope_parameters=rotation)
    embedding = modeling.Qwen2_5_VLRotaryEmbedding(config)
    positions = torch.randint(0, 3000, (3, 9), generator=torch.Generator().manual_seed(1))
    found = mrope_cos_sin(positions, embedding.inv_freq, (16, 24, 24), interleaved=False)
    for ours, theirs in zip(found, embedding(randn(1, 1), positions[:, None]), strict=True):
        assert_near(ours, theirs[0, :, :64], 2e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_heads_without_norms_are_rotated_alone(dtype: torch.dtype) -> None:
    cos, sin = mrope_cos_sin(torch.arange(9).expand(3, -1), torch.rand(8), (4, 2, 2))
    q, k = randn(9, 3, 40, dtype=dtype), randn(9, 1, 40, dtype=dtype, seed=1)
    for x, result in zip(
        (q, k), qk_norm_rope(q, k, Rotation(None, None, cos, sin, EPS)), strict=True
    ):
        wide, (c, s) = x.double(), (cos[:, None], sin[:, None])
        first, second = wide[..., :8], wide[..., 8:16]
        turned = first * c - second * s, second * c + first * s, wide[..., 16:]
        assert result.dtype == dtype and result.is_contiguous()
        assert_near(result, torch.cat(turned, -1), TOLERANCE[dtype])


def test_cos_and_sin_do_not_depend_on_the_batch() -> None:
    positions = torch.arange(900).expand(3, -1)
    inv_freq = 1e4 ** -torch.linspace(0, 1, 20)
    whole = mrope_cos_sin(positions, inv_freq, (8, 6, 6))
    part = mrope_cos_sin(positions[:, 333:334], inv_freq, (8, 6, 6))
    assert torch.equal(part[0], whole[0][333:334]) and torch.equal(part[1], whole[1][333:334])


def test_a_token_has_the_same_bits_in_any_batch() -> None:
    cos, sin = mrope_cos_sin(torch.arange(300).expand(3, -1), torch.rand(8), (4, 2, 2))
    q, k, weight = randn(300, 3, 40), randn(300, 1, 40, seed=1), randn(40, seed=2)
    whole = qk_norm_rope(q, k, Rotation(weight, weight, cos, sin, EPS))
    for own in (slice(0, 1), slice(7, 120), slice(299, 300)):
        part = qk_norm_rope(q[own], k[own], Rotation(weight, weight, cos[own], sin[own], EPS))
        assert torch.equal(part[0], whole[0][own]) and torch.equal(part[1], whole[1][own])


def test_bad_arguments_are_named() -> None:
    q, k, weight = randn(2, 4, 16), randn(2, 1, 16), randn(16)
    cos = sin = torch.zeros(2, 8)
    for name, arguments in {
        "k": (q, k[:1], weight, weight, cos, sin),
        "q_weight": (q, k, weight[:8], weight, cos, sin),
        "cos": (q, k, weight, weight, torch.zeros(2, 9), torch.zeros(2, 9)),
        "sin": (q, k, weight, weight, cos, sin[:1]),
    }.items():
        with pytest.raises(KernelArgumentError, match=name) as error:
            qk_norm_rope(*arguments[:2], Rotation(*arguments[2:], EPS))
        assert error.value.argument == name
    with pytest.raises(KernelArgumentError, match="positions"):
        mrope_cos_sin(torch.zeros(2, 4, dtype=torch.int64), torch.ones(8), (4, 2, 2))
    with pytest.raises(KernelArgumentError, match="sections"):
        mrope_cos_sin(torch.zeros(3, 4, dtype=torch.int64), torch.ones(8), (4, 4))


def test_cosines_and_sines_are_scaled() -> None:
    positions, inv_freq = torch.arange(50).expand(3, -1), 1e4 ** -torch.linspace(0, 1, 20)
    plain = mrope_cos_sin(positions, inv_freq, (8, 6, 6))
    scaled = mrope_cos_sin(positions, inv_freq, (8, 6, 6), 1.25)
    assert all(torch.equal(a, 1.25 * b) for a, b in zip(scaled, plain, strict=True))
