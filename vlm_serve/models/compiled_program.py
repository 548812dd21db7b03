"""A model as `native/program.h` describes it to the compiled forward."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from vlm_serve.kernels.causal_conv.compiled import MOST_TAPS
from vlm_serve.kernels.linear import Linear, WeightRecord
from vlm_serve.kernels.metadata import KVLayer
from vlm_serve.kernels.native_layout import constant, mirrors
from vlm_serve.kernels.native_records import DTYPES, LANES, fields
from vlm_serve.kernels.rope.compiled import MOST_DIM, axes
from vlm_serve.models.batch import CacheTensors
from vlm_serve.models.layers import Attention, DecoderLayer, Experts, GatedDeltaNet, Mlp, StateLayer
from vlm_serve.models.sizes import TextConfig

_MOST_SHARED = constant("MOST_SHARED", 16)
"""Value heads of a key head."""
_GATED_DELTA, _ATTENTION = constant("GATED_DELTA", 0), constant("ATTENTION", 1)


class UnsupportedError(Exception):
    """The compiled forward cannot run this model; the message says why."""


@mirrors("Sizes")
class SizesRecord(ctypes.Structure):
    """`Sizes`: what all layers share."""

    _fields_ = (
        *fields(ctypes.c_int64, "hidden", "vocab", "layers"),
        *fields(ctypes.c_int64, "heads", "kv_heads", "head_dim", "rotary_half"),
        *fields(ctypes.c_int64, "key_heads", "value_heads", "key_dim", "value_dim", "conv_kernel"),
        *fields(ctypes.c_int64, "experts", "top_k"),
        *fields(ctypes.c_int64, "block_size", "kv_block_stride", "kv_token_stride"),
        *fields(ctypes.c_int64, "conv_row_stride", "state_row_stride"),
        *fields(ctypes.c_double, "eps", "scale"),
    )


@mirrors("Layer")
class LayerRecord(ctypes.Structure):
    """`Layer`: one decoder layer and its part of the pools."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        *fields(ctypes.c_void_p, "input_norm", "post_norm"),
        *fields(WeightRecord, "in_proj", "out_proj"),
        *fields(ctypes.c_void_p, "conv", "neg_decay", "dt_bias", "gated_norm", "tails", "states"),
        *fields(ctypes.c_void_p, "q_norm", "k_norm", "k_pages", "v_pages"),
        *fields(WeightRecord, "gate", "up", "down", "router"),
        *fields(ctypes.c_void_p, "expert_gate_up", "expert_down"),
    )


@mirrors("Model")
class ModelRecord(ctypes.Structure):
    """`Model`: all of it."""

    _fields_ = (
        ("sizes", SizesRecord),
        *fields(ctypes.c_void_p, "layers", "final_norm"),
        ("head", WeightRecord),
        *fields(ctypes.c_void_p, "inv_freq", "rope_axis"),
    )


class Program:
    """The records of a model over its pools, and everything they point to.

    Args:
        config: sizes.
        layers, norm, head, inv_freq: the model's.
        caches: pools; their layers' views are `cache_layers`.

    Attributes:
        record: what the compiled forward is given.
        rows, blocks, block_size: of the pools.

    Raises:
        UnsupportedError: a size, dtype or layout that the compiled forward does not know.
    """

    def __init__(
        self,
        config: TextConfig,
        layers: Sequence[DecoderLayer],
        norm: torch.Tensor,
        head: Linear,
        inv_freq: torch.Tensor,
        caches: CacheTensors,
        cache_layers: Sequence[KVLayer | StateLayer],
    ) -> None:
        _check_sizes(config)
        _check_caches(caches, norm.dtype)
        self._alive: list[object] = [caches]
        self._dtype = norm.dtype
        self.rows, self.blocks = caches.recurrent.shape[0], caches.kv.shape[0]
        self.block_size = caches.kv.shape[3]
        records = (LayerRecord * len(layers))(
            *(self._layer(*pair) for pair in zip(layers, cache_layers, strict=True))
        )
        rope_axis = axes(len(inv_freq), config.rope.sections)
        self._alive.extend((records, rope_axis, inv_freq))
        self.record = ModelRecord(
            sizes=_sizes(config, caches),
            layers=ctypes.addressof(records),
            final_norm=self._factors(norm),
            head=self._weight(head),
            inv_freq=inv_freq.data_ptr(),
            rope_axis=rope_axis.data_ptr(),
        )

    def _layer(self, layer: DecoderLayer, cache: KVLayer | StateLayer) -> LayerRecord:
        record = LayerRecord(
            input_norm=self._factors(layer.input_norm),
            post_norm=self._factors(layer.post_norm),
            in_proj=self._weight(layer.mixer.in_proj),
            out_proj=self._weight(layer.mixer.out_proj),
        )
        if isinstance(layer.mixer, GatedDeltaNet):
            assert isinstance(cache, StateLayer)
            self._gated_delta(record, layer.mixer, cache)
        else:
            assert isinstance(cache, KVLayer)
            self._attention(record, layer.mixer, cache)
        if isinstance(layer.feed_forward, Mlp):
            self._mlp(record, layer.feed_forward)
        else:
            self._experts(record, layer.feed_forward)
        return record

    def _gated_delta(self, record: LayerRecord, mixer: GatedDeltaNet, cache: StateLayer) -> None:
        record.kind = _GATED_DELTA
        record.conv = self._vector(mixer.conv.T)
        record.neg_decay = self._vector(mixer.neg_decay)
        record.dt_bias = self._vector(mixer.dt_bias)
        record.gated_norm = self._vector(mixer.norm)
        record.tails = cache.conv.data_ptr()
        record.states = cache.recurrent.data_ptr()

    def _attention(self, record: LayerRecord, mixer: Attention, cache: KVLayer) -> None:
        record.kind = _ATTENTION
        record.q_norm = self._factors(mixer.q_norm)
        record.k_norm = self._factors(mixer.k_norm)
        record.k_pages = cache.k.data_ptr()
        record.v_pages = cache.v.data_ptr()

    def _mlp(self, record: LayerRecord, mlp: Mlp) -> None:
        record.gate = self._weight(mlp.gate)
        record.up = self._weight(mlp.up)
        record.down = self._weight(mlp.down)

    def _experts(self, record: LayerRecord, experts: Experts) -> None:
        self._mlp(record, experts.shared)
        record.router = self._weight(experts.router)
        record.expert_gate_up = self._weights(experts.gate_up)
        record.expert_down = self._weights(experts.down)

    def _weights(self, weights: torch.Tensor | Sequence[Linear]) -> int:
        if isinstance(weights, torch.Tensor):
            raise UnsupportedError("experts in one tensor")
        records = (WeightRecord * len(weights))(*map(self._weight, weights))
        self._alive.append(records)
        return ctypes.addressof(records)

    def _weight(self, weight: Linear) -> WeightRecord:
        record = weight.record()
        if record is None:
            raise UnsupportedError("weights that torch multiplies by")
        if self._dtype == torch.bfloat16 != weight.dtype:
            raise UnsupportedError(f"bfloat16 activations beside weights in {weight.dtype}")
        self._alive.append(weight)
        return record

    def _factors(self, norm: torch.Tensor) -> int:
        """Factors of a zero-centred norm."""
        return self._vector(norm.float() + 1.0)

    def _vector(self, values: torch.Tensor) -> int:
        own = values.float().contiguous()
        self._alive.append(own)
        return own.data_ptr()


def _check_sizes(config: TextConfig) -> None:
    moe = config.moe
    for name, size in (
        ("hidden_size", config.hidden_size),
        ("head_dim", config.head_dim),
        ("linear_key_head_dim", config.gdn_key_dim),
        ("linear_value_head_dim", config.gdn_value_dim),
        ("intermediate_size", moe.shared_intermediate_size if moe else config.intermediate_size),
        ("moe_intermediate_size", moe.intermediate_size if moe else 0),
    ):
        if size % LANES:
            raise UnsupportedError(f"{name} is {size}, not a multiple of {LANES}")
    if config.conv_kernel > MOST_TAPS:
        raise UnsupportedError(f"convolutions of {config.conv_kernel} taps")
    if config.head_dim > MOST_DIM:
        raise UnsupportedError(f"head_dim is {config.head_dim}, more than {MOST_DIM}")
    shared = config.gdn_value_heads // config.gdn_key_heads
    if shared > _MOST_SHARED:
        raise UnsupportedError(f"{shared} value heads for a key head")


def _check_caches(caches: CacheTensors, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise UnsupportedError(f"activations in {dtype}")
    if caches.kv.dtype != dtype:
        raise UnsupportedError(f"KV pages in {caches.kv.dtype} beside activations in {dtype}")
    if caches.recurrent.dtype != torch.float32:
        raise UnsupportedError(f"states in {caches.recurrent.dtype}")
    for pool in (caches.kv, caches.conv, caches.recurrent):
        if not pool.is_contiguous():
            raise UnsupportedError("pools that are not contiguous")


def _sizes(config: TextConfig, caches: CacheTensors) -> SizesRecord:
    return SizesRecord(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        layers=config.num_layers,
        heads=config.attention_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        rotary_half=config.rope.rotary_dim // 2,
        key_heads=config.gdn_key_heads,
        value_heads=config.gdn_value_heads,
        key_dim=config.gdn_key_dim,
        value_dim=config.gdn_value_dim,
        conv_kernel=config.conv_kernel,
        experts=config.moe.num_experts if config.moe else 0,
        top_k=config.moe.top_k if config.moe else 0,
        block_size=caches.kv.shape[3],
        kv_block_stride=caches.kv.stride(0),
        kv_token_stride=caches.kv.stride(3),
        conv_row_stride=caches.conv.stride(0),
        state_row_stride=caches.recurrent.stride(0),
        eps=config.norm_eps,
        scale=config.head_dim**-0.5,
    )
