"""Ops that do several others' work in fewer launches have the bits of those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton_case import DEVICE, heads_of, kernels, randn
from triton_pools import FORMS, filled, layer, state_pool

from vlm_serve.kernels.causal_conv import causal_conv_decode
from vlm_serve.kernels.elementwise import times_sigmoid
from vlm_serve.kernels.gated_delta import decoding_triton, gates, recurrent_gated_delta
from vlm_serve.kernels.gated_delta.decoding import Mixing, mix_decode
from vlm_serve.kernels.kv_write import rotate_and_write, write_kv
from vlm_serve.kernels.metadata import DecodeMeta
from vlm_serve.kernels.moe import route, routed_experts
from vlm_serve.kernels.moe.reference import Addends
from vlm_serve.kernels.norms import gated_rms_norm
from vlm_serve.kernels.paged_attention import attention_decode
from vlm_serve.kernels.rope import Rotation, qk_norm_rope
from vlm_serve.kernels.triton_support import Target, record_launches

KEY_HEADS, HEADS, KEY_DIM, DIM, TAPS = 2, 6, 24, 40, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * DIM
META = DecodeMeta(((),) * 3, (1,) * 3, (2, -1, 5), (2, 0, 4), (7, -1, 1))


def mixing(dtype: torch.dtype, state: torch.dtype, norm: torch.dtype) -> Mixing:
    tails = state_pool(8, {2, 5}, (CHANNELS, TAPS - 1), dtype)
    return Mixing(
        conv=randn(CHANNELS, TAPS, dtype=dtype),
        neg_decay=-randn(HEADS, seed=1).abs(),
        dt_bias=randn(HEADS, seed=2),
        norm=randn(DIM, dtype=norm, seed=3),
        eps=1e-6,
        tails=tails,
        state=state_pool(8, {2, 5}, (HEADS, KEY_DIM, DIM), state),
    )


def apart(wide: torch.Tensor, own: Mixing) -> torch.Tensor:
    """The same op by op."""
    mixed, z, raw = own.split(wide)
    beta, decay = gates(raw, own.neg_decay, own.dt_bias)
    q, k, v = own.heads(causal_conv_decode(mixed, own.conv, own.tails, META))
    core = recurrent_gated_delta(q, k, v, decay, beta, own.state, META)
    return gated_rms_norm(core, z, own.norm, own.eps).flatten(1)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize(
    ("dtype", "state", "norm"),
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.float16, torch.float16),
    ],
)
@pytest.mark.parametrize("change", [{}, {"MOST_STATE": 64}, {"FEW": 2}, {"deterministic": True}])
def test_a_mixer_between_its_products(
    dtype: torch.dtype,
    state: torch.dtype,
    norm: torch.dtype,
    change: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one launch behind the convolution or, where that would be too large, in two."""
    exact = change.get("deterministic", False)
    for name in change.keys() - {"deterministic"}:
        monkeypatch.setattr(decoding_triton, name, change[name])
    wide = randn(3, CHANNELS + HEADS * DIM + 2 * HEADS + 3, dtype=dtype)[:, :-3]
    one, other = mixing(dtype, state, norm), mixing(dtype, state, norm)
    with kernels():
        expected = apart(wide, one)
        result = mix_decode(wide, other, META, deterministic=exact)
    assert result.isfinite().all() and torch.equal(result, expected)
    assert torch.equal(bits(other.tails), bits(one.tails))
    assert torch.equal(bits(other.state), bits(one.state))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("heads", "dim", "rotated"), [((4, 1), 64, 64), ((6, 3), 40, 16)])
def test_rotation_and_pages(
    dtype: torch.dtype, form: torch.dtype, heads: tuple[int, int], dim: int, rotated: int
) -> None:
    queries, keys = heads
    fused = randn(7, (queries + 2 * keys) * dim + 8, dtype=dtype) * 10
    first, second = queries * dim, (queries + keys) * dim
    q, k = heads_of(fused[:, :first], queries), heads_of(fused[:, first:second], keys)
    v = heads_of(fused[:, second : second + keys * dim], keys)
    angles = randn(7, rotated // 2)
    weights = randn(dim, seed=1), randn(dim, seed=2)
    rotation = Rotation(*weights, angles.cos(), angles.sin(), 1e-6)
    slots = torch.tensor([13, -1, 0, 7, 19, -1, 12], device=DEVICE)
    one, other = layer(form, keys, dim), layer(form, keys, dim)
    with kernels():
        expected, turned = qk_norm_rope(q, k, rotation)
        write_kv(turned, v, one[0], slots)
        result = rotate_and_write(q, k, v, rotation, other[0], slots)
    assert torch.equal(result, expected)
    for mine, theirs in zip(other[1:], one[1:], strict=True):
        assert torch.equal(bits(mine), bits(theirs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("longest", [40, 600])
def test_attention_and_its_gate(dtype: torch.dtype, longest: int) -> None:
    lengths = [longest, 17]
    kv, tables = filled(lengths, 2, 32, torch.float32, seed=0)
    q = randn(2, 6, 32, dtype=dtype)
    gate = randn(2, 400, dtype=dtype, seed=9)[:, 100 : 100 + 6 * 32]
    none = (-1, -1)
    with kernels():
        meta = DecodeMeta(tables, tuple(lengths), none, none, none)
        plain = attention_decode(q, kv, meta, scale=32**-0.5)
        result = attention_decode(q, kv, meta, gate, scale=32**-0.5)
        expected = times_sigmoid(plain.flatten(1), gate)
    assert torch.equal(result.flatten(1), expected)


# Not bfloat16, which the interpreter cuts where torch's sums round.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shared", [False, True])
def test_experts_and_what_is_beside_them(dtype: torch.dtype, shared: bool) -> None:
    tokens, experts, hidden, width = 3, 4, 40, 24
    x = randn(tokens, hidden, dtype=dtype)
    scores = randn(tokens, experts + 1, dtype=dtype, seed=1)
    gate_up = randn(experts, 2 * width, hidden, dtype=dtype, seed=2) * 0.2
    down = randn(experts, hidden, width, dtype=dtype, seed=3) * 0.2
    residual = randn(tokens, hidden, dtype=dtype, seed=4)
    own = randn(tokens, hidden, dtype=dtype, seed=5)
    gate = scores[:, experts:]
    with kernels():
        weights, ids = route(scores[:, :experts], 2)
        out = routed_experts(x, weights, ids, gate_up, down)
        if shared:
            out = out + times_sigmoid(own, gate)
        addends = Addends(residual, own, gate) if shared else Addends(residual)
        result = routed_experts(x, weights, ids, gate_up, down, addends=addends)
    assert torch.equal(result, residual + out)


def test_launches() -> None:
    """What the joined ops are for."""
    wide = torch.zeros(3, CHANNELS + HEADS * DIM + 2 * HEADS, device=DEVICE)
    own = mixing(torch.float32, torch.float32, torch.float32)
    with kernels(), record_launches(Target("cuda", 90)) as launches:
        mix_decode(wide, own, META)
    assert [each.kernel.__name__ for each in launches] == ["_inputs_kernel", "_normed_step_kernel"]
