"""A new architecture of known parts is one file and one entry in the registry: ops and compiled
steps run it, the engine serves it, and all agree with a plain torch version of it, whose Mamba2
layers are transformers'."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_driver import Driver, text_sequence
from oracle import prepare_models
from parity import greedy
from patchwork import KINDS, SERVED, write_checkpoint

from vlm_serve.models import load_model
from vlm_serve.models.registry import FAMILIES
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "patchwork", SERVED)


@pytest.fixture(params=KINDS)
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return write_checkpoint(tmp_path, KINDS[request.param])


def plain(path: Path, token_ids: list[int]) -> torch.Tensor:
    """float64 `[T, vocab]` logits by the textbook, token by token where the state is."""
    from safetensors.torch import load_file

    weights = {
        name.removeprefix("model."): tensor.double()
        for name, tensor in load_file(path / "model.safetensors").items()
    }
    config = json.loads((path / "config.json").read_text())
    x = weights["embed_tokens.weight"][token_ids]
    for index in range(config["num_hidden_layers"]):
        name = f"layers.{index}."
        own = {key.removeprefix(name): w for key, w in weights.items() if key.startswith(name)}
        remember = _remember if config["memory"] == "gated_delta" else _scan
        mix, feed = (remember, _experts) if index % 2 else (_attend, _mlp)
        x = x + mix(own, _norm(x, own["norm_1.weight"], config), config)
        x = x + feed(own, _norm(x, own["norm_2.weight"], config), config)
    head: torch.Tensor = weights["embed_tokens.weight"]
    return _norm(x, weights["norm.weight"], config) @ head.T


def _norm(x: torch.Tensor, weight: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    eps: float = config["norm_eps"]
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def _attend(w: Tensors, x: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    dim, tokens = config["head_dim"], len(x)
    q, k, v = (
        (x @ w[f"attn.{part}_proj.weight"].T).view(tokens, -1, dim).transpose(0, 1)
        for part in "qkv"
    )
    frequencies = config["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
    angles = torch.arange(tokens)[:, None] * frequencies

    def turn(heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        low, high = _norm(heads, weight, config).chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    q, k = turn(q, w["attn.q_norm.weight"]), turn(k, w["attn.k_norm.weight"])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(0, 1).flatten(1) @ w["attn.o_proj.weight"].T


def _mlp(w: Tensors, x: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    hidden = F.silu(x @ w["ffn.gate_proj.weight"].T) * (x @ w["ffn.up_proj.weight"].T)
    return hidden @ w["ffn.down_proj.weight"].T


def _remember(w: Tensors, x: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    heads, key_heads = config["state_value_heads"], config["state_key_heads"]
    key_dim, dim = config["state_key_dim"], config["state_value_dim"]
    conv = w["memory.conv1d.weight"]
    inputs = F.pad((x @ w["memory.in_proj_qkv.weight"].T).T, (conv.shape[-1] - 1, 0))
    qkv = F.silu(F.conv1d(inputs[None], conv, groups=len(conv))[0].T)
    width = key_heads * key_dim
    q, k, v = torch.split_with_sizes(qkv, (width, width, heads * dim), 1)
    q, k = (F.normalize(each.view(-1, key_heads, key_dim), dim=-1) for each in (q, k))
    q, k = (each.repeat_interleave(heads // key_heads, 1) for each in (q, k))
    v = v.view(-1, heads, dim)
    strength = torch.sigmoid(x @ w["memory.in_proj_b.weight"].T)
    pace = F.softplus(x @ w["memory.in_proj_a.weight"].T + w["memory.dt_bias"])
    decay = torch.exp(-w["memory.A_log"].exp() * pace)
    state, outs = torch.zeros(heads, key_dim, dim).double(), []
    for t in range(len(x)):
        state = state * decay[t, :, None, None]
        seen = torch.einsum("hkv,hk->hv", state, k[t])
        change = strength[t, :, None] * (v[t] - seen)
        state = state + k[t, :, :, None] * change[:, None]
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]) * key_dim**-0.5)
    gate = F.silu((x @ w["memory.in_proj_z.weight"].T).view(-1, heads, dim))
    out = _norm(torch.stack(outs), w["memory.norm.weight"], config) * gate
    return out.flatten(1) @ w["memory.out_proj.weight"].T


def _scan(w: Tensors, x: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """The mixers of transformers, in float32: of Nemotron-H, or of Granite for a single group."""
    prepare_models()
    from transformers import GraniteMoeHybridConfig, NemotronHConfig
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
    from transformers.models.nemotron_h import modeling_nemotron_h as nemotron

    sizes = {
        "n_heads": config["mamba_heads"],
        "d_head": config["mamba_head_dim"],
        "d_state": config["mamba_state_dim"],
        "d_conv": config["conv_width"],
    }
    mixer: torch.nn.Module
    if config["mamba_groups"] == 1:
        of_granite = GraniteMoeHybridConfig(
            hidden_size=config["hidden_size"],
            rms_norm_eps=config["norm_eps"],
            layer_types=["mamba"],
            num_hidden_layers=1,
            **{f"mamba_{name}": size for name, size in sizes.items()},
        )
        mixer = granite.GraniteMoeHybridMambaLayer(of_granite, 0)
    else:
        of_nemotron = NemotronHConfig(
            hidden_size=config["hidden_size"],
            layer_norm_epsilon=config["norm_eps"],
            layers_block_type=["mamba"],
            n_groups=config["mamba_groups"],
            use_bias=config["mamba_bias"],
            time_step_min=config["least_step"],
            mamba_num_heads=sizes["n_heads"],
            mamba_head_dim=sizes["d_head"],
            ssm_state_size=sizes["d_state"],
            conv_kernel=sizes["d_conv"],
        )
        mixer = nemotron.NemotronHMamba2Mixer(of_nemotron, 0)
    names = {name: tensor for name, tensor in w.items() if name.startswith("memory.")}
    mixer.load_state_dict({name.removeprefix("memory."): own for name, own in names.items()})
    with torch.no_grad():
        out: torch.Tensor = mixer.float()(x.float()[None])[0]
    return out.double()


def _experts(w: Tensors, x: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    shares = (x @ w["moe.gate.weight"].T).softmax(-1)
    best, ids = shares.topk(config["num_experts_per_tok"])
    best = best / best.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for t, (row, chosen) in enumerate(zip(best, ids.tolist(), strict=True)):
        for share, expert in zip(row, chosen, strict=True):
            gate, up = (w["moe.experts.gate_up_proj"][expert] @ x[t]).chunk(2)
            out[t] += share * (w["moe.experts.down_proj"][expert] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("how", ["ops of torch", "ops", "steps"])
def test_agrees_with_a_plain_version(
    checkpoint: Path, how: str, request: pytest.FixtureRequest
) -> None:
    """A prompt in two slices, then single tokens."""
    if how != "ops of torch":
        request.getfixturevalue("compiler")
    model = load_model(checkpoint, torch.float32, "cpu", compiled=how != "ops of torch")
    tokens = random.Random(0).choices(range(384), k=60)
    expected, driver = plain(checkpoint, tokens), Driver(model)
    sequence = text_sequence(tokens[:50])
    if how == "steps":
        model.compile_steps(driver.caches)
    outputs = [driver.step(prefills=[(sequence, *part)]) for part in ((0, 32), (32, 50))]
    for token in tokens[50:]:
        sequence.tokens.append(token)
        outputs.append(driver.step([sequence]))
    ends = [32, 50, *range(51, 61)]
    for output, end in zip(outputs, ends, strict=True):
        error = (output.logits[-1] - expected[end - 1]).abs().max()
        assert error <= 2e-5 * expected.abs().max()


def test_is_served_from_the_cache_as_cold(checkpoint: Path) -> None:
    tokens = random.Random(1).choices(range(300), k=100)
    options = EngineConfig(dtype="float32", block_size=16, cache_memory="16MiB", max_model_len=512)
    with Pipeline(checkpoint, options) as pipe:
        cold, hit = (pipe.generate(tokens, greedy(12)) for _ in range(2))
        pipe.engine.check()
    assert (cold.usage.cached_tokens, hit.usage.cached_tokens) == (0, 96)
    assert hit.token_ids == cold.token_ids
    following = plain(checkpoint, tokens + list(cold.token_ids))[99:-1]
    assert following.argmax(-1).tolist() == list(cold.token_ids)
