"""Names and shapes of the language model's tensors, and how they are fused."""

from __future__ import annotations

import torch

from vlm_serve.kernels.linear import Linear, Part, load
from vlm_serve.models.layers import Attention, Experts, GatedDeltaNet, Mlp
from vlm_serve.models.sizes import MoEConfig, TextConfig
from vlm_serve.models.weights import Weights


def stacked_experts(device: torch.device) -> bool:
    """Whether kernels for a device take all experts' weights in one tensor."""
    return device.type != "cpu"


class TextLoader:
    """Reads the layers of a language model.

    Args:
        config: sizes.
        weights: where the tensors come from.
    """

    def __init__(self, config: TextConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights

    def embedding_and_head(self) -> tuple[torch.Tensor, Linear]:
        """The lookup table and the output projection."""
        shape = (self._config.vocab_size, self._config.hidden_size)
        name = f"{self._weights.text_prefix}embed_tokens.weight"
        head = name if self._config.tied_embeddings else self._weights.head_name()
        return self._weights.embedding(name, shape), self._load(Part(head, shape))

    def norm(self, name: str) -> torch.Tensor:
        """A zero-centred norm weight, `[hidden]`."""
        full = f"{self._weights.text_prefix}{name}.weight"
        return self._weights.tensor(full, (self._config.hidden_size,))

    def mixer(self, index: int) -> GatedDeltaNet | Attention:
        """The token mixer of a layer, of the type the config names."""
        name = f"{self._weights.text_prefix}layers.{index}"
        if self._config.layer_types[index] == "full_attention":
            return self._attention(f"{name}.self_attn")
        return self._gated_delta(f"{name}.linear_attn")

    def feed_forward(self, index: int) -> Mlp | Experts:
        """The MLP or the experts of a layer."""
        name = f"{self._weights.text_prefix}layers.{index}.mlp"
        if self._config.moe is not None:
            return self._experts(name, self._config.moe)
        return self._mlp(name, self._config.intermediate_size)

    def _load(self, *parts: Part, bias: list[Part] | None = None) -> Linear:
        return load(self._weights, list(parts), bias)

    def _gated_delta(self, name: str) -> GatedDeltaNet:
        config, weights = self._config, self._weights
        hidden, heads, values = config.hidden_size, config.gdn_value_heads, config.value_dim
        conv = (config.conv_dim, 1, config.conv_kernel)
        decay = weights.tensor(f"{name}.A_log", (heads,)).float().exp()
        rows = {"qkv": config.conv_dim, "z": values, "b": heads, "a": heads}
        return GatedDeltaNet(
            in_proj=self._load(
                *(Part(f"{name}.in_proj_{part}.weight", (n, hidden)) for part, n in rows.items())
            ),
            conv=weights.tensor(f"{name}.conv1d.weight", conv).squeeze(1),
            neg_decay=-decay,
            dt_bias=weights.tensor(f"{name}.dt_bias", (heads,)).float(),
            norm=weights.tensor(f"{name}.norm.weight", (config.gdn_value_dim,)),
            out_proj=self._load(Part(f"{name}.out_proj.weight", (hidden, values))),
            key_heads=config.gdn_key_heads,
            value_heads=heads,
            key_dim=config.gdn_key_dim,
            value_dim=config.gdn_value_dim,
            eps=config.norm_eps,
        )

    def _attention(self, name: str) -> Attention:
        config, weights = self._config, self._weights
        hidden, queries = config.hidden_size, config.attention_heads * config.head_dim
        biased, out = config.attention_bias, f"{name}.o_proj"
        return Attention(
            in_proj=self._load(
                *self._attention_input(name, "weight", (hidden,)),
                bias=self._attention_input(name, "bias", ()) if biased else None,
            ),
            q_norm=weights.tensor(f"{name}.q_norm.weight", (config.head_dim,)),
            k_norm=weights.tensor(f"{name}.k_norm.weight", (config.head_dim,)),
            out_proj=self._load(
                Part(f"{out}.weight", (hidden, queries)),
                bias=[Part(f"{out}.bias", (hidden,))] if biased else None,
            ),
            heads=config.attention_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            eps=config.norm_eps,
        )

    def _attention_input(self, name: str, kind: str, tail: tuple[int, ...]) -> list[Part]:
        """Query, key, value and gate rows. The checkpoint keeps a head's query and gate together;
        here all queries come first and all gates last."""
        config, dim = self._config, self._config.head_dim
        keys = (config.kv_heads * dim, *tail)
        both = (2 * config.attention_heads * dim, *tail)
        starts = range(0, both[0], 2 * dim)
        queries = tuple(range(start, start + dim) for start in starts)
        gates = tuple(range(start + dim, start + 2 * dim) for start in starts)
        return [
            Part(f"{name}.q_proj.{kind}", both, queries),
            Part(f"{name}.k_proj.{kind}", keys),
            Part(f"{name}.v_proj.{kind}", keys),
            Part(f"{name}.q_proj.{kind}", both, gates),
        ]

    def _mlp(self, name: str, size: int) -> Mlp:
        hidden = self._config.hidden_size
        return Mlp(
            gate=self._load(Part(f"{name}.gate_proj.weight", (size, hidden))),
            up=self._load(Part(f"{name}.up_proj.weight", (size, hidden))),
            down=self._load(Part(f"{name}.down_proj.weight", (hidden, size))),
        )

    def _experts(self, name: str, moe: MoEConfig) -> Experts:
        hidden = self._config.hidden_size
        gate_up, down = self._expert_parts(f"{name}.experts", moe)
        stacked = stacked_experts(self._weights.device)
        return Experts(
            router=self._load(
                Part(f"{name}.gate.weight", (moe.num_experts, hidden)),
                Part(f"{name}.shared_expert_gate.weight", (1, hidden)),
            ),
            gate_up=self._stacked(gate_up, moe.num_experts) if stacked else self._apart(gate_up),
            down=self._stacked(down, moe.num_experts) if stacked else self._apart(down),
            shared=self._mlp(f"{name}.shared_expert", moe.shared_intermediate_size),
            top_k=moe.top_k,
        )

    def _apart(self, parts: list[Part]) -> tuple[Linear, ...]:
        return tuple(self._load(part) for part in parts)

    def _stacked(self, parts: list[Part], count: int) -> torch.Tensor:
        """`[count, rows, K]`, for kernels that take all experts in one tensor."""
        pieces = [piece for part in parts for piece in part.pieces(self._weights, None)]
        whole = torch.cat(pieces).to(self._weights.device)
        return whole.view(count, -1, whole.shape[1])

    def _expert_parts(self, name: str, moe: MoEConfig) -> tuple[list[Part], list[Part]]:
        """Gate and up of every expert, and down of every expert; checkpoints hold them in one
        tensor, or expert by expert."""
        hidden, size, count = self._config.hidden_size, moe.intermediate_size, moe.num_experts
        if f"{name}.gate_up_proj" in self._weights:
            both, down = (count, 2 * size, hidden), (count, hidden, size)
            halves = (range(size), range(size, 2 * size))
            return (
                [
                    Part(f"{name}.gate_up_proj", both, (half,), expert)
                    for expert in range(count)
                    for half in halves
                ],
                [Part(f"{name}.down_proj", down, index=expert) for expert in range(count)],
            )
        return (
            [
                Part(f"{name}.{expert}.{part}_proj.weight", (size, hidden))
                for expert in range(count)
                for part in ("gate", "up")
            ],
            [Part(f"{name}.{expert}.down_proj.weight", (hidden, size)) for expert in range(count)],
        )
