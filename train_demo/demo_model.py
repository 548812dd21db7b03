"""The Qwen3.5 architecture for training on short, equally long sequences.

Mathematics and weight names are those of the published model (dense and mixture of experts), but
tensors are plain batches: pictures of a batch share one grid, sequences are padded at the end. On a
CPU that is several times as fast as the general model.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from demo_data import Batch
from demo_delta import GatedDeltaNet
from demo_experts import MLP, SparseMLP
from demo_shape import DemoShape
from demo_vision import Vision, rotate
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Zero-centred: scales by 1 + weight."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1.0 + self.weight, 1e-6)


class Attention(nn.Module):
    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, 2 * width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_dim)
        self.k_norm = RMSNorm(shape.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        dim, turned = self.shape.head_dim, self.shape.rope_dims
        q, gate = self.q_proj(x).view(batch, length, -1, 2 * dim).chunk(2, dim=-1)
        q = self.q_norm(q).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, -1, dim)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, -1, dim).transpose(1, 2)
        q, k = (
            torch.cat((rotate(part[..., :turned], cos, sin), part[..., turned:]), dim=-1)
            for part in (q, k)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out = out.transpose(1, 2) * torch.sigmoid(gate)
        return cast(Tensor, self.o_proj(out.reshape(batch, length, -1)))


class Layer(nn.Module):
    def __init__(self, shape: DemoShape, index: int) -> None:
        super().__init__()
        self.attends = shape.is_attention(index)
        if self.attends:
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = GatedDeltaNet(shape)
        if shape.experts:
            self.mlp: nn.Module = SparseMLP(shape)
        else:
            self.mlp = MLP(shape.hidden, shape.intermediate)
        self.input_layernorm = RMSNorm(shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        x = x + (self.self_attn(normed, cos, sin) if self.attends else self.linear_attn(normed))
        return x + cast(Tensor, self.mlp(self.post_attention_layernorm(x)))


class LanguageModel(nn.Module):
    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, index) for index in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Map embeddings [B, T, hidden] and M-RoPE positions [3, B, T] to hidden states.

        Returns the input of the last layer as well.
        """
        cos, sin = self.rotation(positions)
        for layer in self.layers:
            read, x = x, layer(x, cos, sin)
        return self.norm(x), read

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [B, 1, T, rotary dimensions] of M-RoPE positions [3, B, T]."""
        dims = self.shape.rope_dims
        frequencies = self.shape.rope_theta ** -(torch.arange(0, dims, 2).float() / dims)
        angles = positions[..., None] * frequencies
        mixed = angles[0].clone()
        for axis in (1, 2):
            chosen = slice(axis, 3 * self.shape.rope_sections[axis], 3)
            mixed[..., chosen] = angles[axis][..., chosen]
        mixed = torch.cat((mixed, mixed), dim=-1)[:, None]
        return mixed.cos(), mixed.sin()


class DemoModel(nn.Module):
    """Vision tower and language model under the names of the published checkpoints."""

    def __init__(self, shape: DemoShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = nn.Module()
        self.model.visual = Vision(shape)
        self.model.language_model = LanguageModel(shape)
        self._initialise()

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2 and "norm" not in name:
                fan_in = parameter[0].numel()
                plain = {"embed_tokens": 0.02, "pos_embed": 0.3}
                std = plain.get(name.split(".")[-2], 0.7 * fan_in**-0.5)
                nn.init.normal_(parameter, std=std)
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)

    @property
    def visual(self) -> Vision:
        return cast(Vision, self.model.visual)

    @property
    def language_model(self) -> LanguageModel:
        return cast(LanguageModel, self.model.language_model)

    def see(self, batch: Batch) -> list[Tensor]:
        """Return embeddings [pictures, cells, hidden] of every slot."""
        return [self.visual(slot.patches, slot.rows, slot.columns) for slot in batch.slots]

    def read(self, batch: Batch, seen: list[Tensor]) -> Tensor:
        """Return hidden states [B, T, hidden]."""
        return self.states(batch, seen)[0]

    def states(self, batch: Batch, seen: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return hidden states and the last layer's input, both [B, T, hidden]."""
        x = self.embedded(batch, seen)
        return cast(tuple[Tensor, Tensor], self.language_model(x, batch.positions))

    def embedded(self, batch: Batch, seen: list[Tensor]) -> Tensor:
        """Return the first layer's input, [B, T, hidden]."""
        table = self.language_model.embed_tokens
        x = table(batch.ids)
        if batch.slots:
            flat = x.flatten(0, 1)
            for slot, embeddings in zip(batch.slots, seen, strict=True):
                flat = flat.index_copy(0, slot.places, embeddings.flatten(0, 1))
            x = flat.view_as(x)
        return cast(Tensor, x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the tied output projection."""
        return F.linear(hidden, self.language_model.embed_tokens.weight)
