"""Names and shapes of the language model's tensors, and how they are fused."""

from __future__ import annotations

import torch

from vlm_serve.kernels.linear import pack
from vlm_serve.kernels.moe import pack_experts
from vlm_serve.models.layers import Attention, Experts, GatedDeltaNet, Mlp
from vlm_serve.models.sizes import MoEConfig, TextConfig
from vlm_serve.models.weights import Weights


class TextLoader:
    """Reads the layers of a language model.

    Args:
        config: sizes.
        weights: where the tensors come from.
    """

    def __init__(self, config: TextConfig, weights: Weights) -> None:
        self._config = config
        self._weights = weights

    def embedding_and_head(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The lookup table and the output projection."""
        shape = (self._config.vocab_size, self._config.hidden_size)
        name = f"{self._weights.text_prefix}embed_tokens.weight"
        head = name if self._config.tied_embeddings else self._weights.head_name()
        return self._weights.embedding(name, shape), self._weights.projection([head], [shape])

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

    def _gated_delta(self, name: str) -> GatedDeltaNet:
        config, weights = self._config, self._weights
        hidden, heads, values = config.hidden_size, config.gdn_value_heads, config.value_dim
        conv = (config.conv_dim, 1, config.conv_kernel)
        decay = weights.tensor(f"{name}.A_log", (heads,)).float().exp()
        return GatedDeltaNet(
            in_proj=weights.projection(
                [f"{name}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")],
                [(config.conv_dim, hidden), (values, hidden), (heads, hidden), (heads, hidden)],
            ),
            conv=weights.tensor(f"{name}.conv1d.weight", conv).squeeze(1),
            neg_decay=-decay,
            dt_bias=weights.tensor(f"{name}.dt_bias", (heads,)).float(),
            norm=weights.tensor(f"{name}.norm.weight", (config.gdn_value_dim,)),
            out_proj=weights.projection([f"{name}.out_proj.weight"], [(hidden, values)]),
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
            in_proj=pack(self._attention_input(name, "weight", (hidden,))),
            in_bias=self._attention_input(name, "bias", ()) if biased else None,
            q_norm=weights.tensor(f"{name}.q_norm.weight", (config.head_dim,)),
            k_norm=weights.tensor(f"{name}.k_norm.weight", (config.head_dim,)),
            out_proj=weights.projection([f"{out}.weight"], [(hidden, queries)]),
            out_bias=weights.tensor(f"{out}.bias", (hidden,)) if biased else None,
            heads=config.attention_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            eps=config.norm_eps,
        )

    def _attention_input(self, name: str, kind: str, tail: tuple[int, ...]) -> torch.Tensor:
        """Query, key, value and gate rows. The checkpoint keeps a head's query and gate together;
        here all queries come first and all gates last."""
        config = self._config
        queries, keys = config.attention_heads * config.head_dim, config.kv_heads * config.head_dim
        stacked = self._weights.stacked(
            [f"{name}.{part}_proj.{kind}" for part in "qkv"],
            [(2 * queries, *tail), (keys, *tail), (keys, *tail)],
        )
        per_head = stacked[: 2 * queries].view(config.attention_heads, 2, config.head_dim, *tail)
        query, gate = per_head[:, 0].flatten(0, 1), per_head[:, 1].flatten(0, 1)
        return torch.cat([query, stacked[2 * queries :], gate])

    def _mlp(self, name: str, size: int) -> Mlp:
        hidden = self._config.hidden_size
        return Mlp(
            gate=self._weights.projection([f"{name}.gate_proj.weight"], [(size, hidden)]),
            up=self._weights.projection([f"{name}.up_proj.weight"], [(size, hidden)]),
            down=self._weights.projection([f"{name}.down_proj.weight"], [(hidden, size)]),
        )

    def _experts(self, name: str, moe: MoEConfig) -> Experts:
        hidden = self._config.hidden_size
        gate_up, down = self._expert_weights(f"{name}.experts", moe)
        return Experts(
            router=self._weights.projection(
                [f"{name}.gate.weight", f"{name}.shared_expert_gate.weight"],
                [(moe.num_experts, hidden), (1, hidden)],
            ),
            gate_up=pack_experts(gate_up, parts=2),
            down=pack_experts(down),
            shared=self._mlp(f"{name}.shared_expert", moe.shared_intermediate_size),
            top_k=moe.top_k,
        )

    def _expert_weights(self, name: str, moe: MoEConfig) -> tuple[torch.Tensor, torch.Tensor]:
        """`[E, 2I, H]` and `[E, H, I]`; checkpoints hold them so, or expert by expert."""
        hidden, size, count = self._config.hidden_size, moe.intermediate_size, moe.num_experts
        if f"{name}.gate_up_proj" in self._weights:
            return (
                self._weights.tensor(f"{name}.gate_up_proj", (count, 2 * size, hidden)),
                self._weights.tensor(f"{name}.down_proj", (count, hidden, size)),
            )
        gate_up = self._weights.stacked(
            [
                f"{name}.{expert}.{part}_proj.weight"
                for expert in range(count)
                for part in ("gate", "up")
            ],
            [(size, hidden)] * (2 * count),
        )
        down = self._weights.stacked(
            [f"{name}.{expert}.down_proj.weight" for expert in range(count)],
            [(hidden, size)] * count,
        )
        return gate_up.view(count, 2 * size, hidden), down.view(count, hidden, size)
