"""What the bits of a prompt's row depend on, op by op, on a GPU.

A hit of a prompt is exact if every op that computes its rows gives a row the same bits whatever
else a step holds: then it does not matter which of them come from the cache. The table covers each
op of docs/step.md with kernels for GPUs, and torch's products.

docs/architecture.md#batch-invariance
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Literal, NamedTuple

from vlm_serve.models.spec import ModelSpec
from vlm_serve.options.config import EngineConfig

On = Literal["nothing", "rows", "neighbours"]
"""Beside the row and its sequence: nothing, the number of rows in the call, or what these hold."""
Part = Literal["any", "plain", "codes", "experts", "tower", "adapters", "fla"]
"""Models and options by which an op runs; "plain" and "codes" are forms of weights."""
USUAL: frozenset[Part] = frozenset({"any", "plain"})


class Dependence(NamedTuple):
    """Dependence of a prompt's row on others in an op.

    Attributes:
        on: by default.
        why: what it does, as far as that decides.
        part: what a model or its options must have for it to run.
        name: for people; "" where nothing depends on company.
        fixed: with `batch_invariant`.
    """

    on: On
    why: str
    part: Part = "any"
    name: str = ""
    fixed: On = "nothing"


_PLAIN = "products with plain weights"
_CODES = "products with quantised weights"
_UNSHOWN = "all sequences of a step in one call; nobody has shown that their bits are their own"
_TOWER = "products of all patches of a step, and torch's attention of pictures without a graph"
_BY_NUMBER: Mapping[str, Dependence] = {
    "torch products": Dependence("rows", "a library chooses by their number", "plain", _PLAIN),
    "linear.few_rows_triton:few_rows": Dependence("rows", "up to 8, in one order", "plain", _PLAIN),
    "linear.codes_triton:product": Dependence("rows", "tiles of 16, 32 or 64", "codes", _CODES),
    "linear.few_codes_triton:few_codes": Dependence("rows", "up to 8", "codes", _CODES),
    "moe.triton:routed_experts": Dependence("rows", "tiles by pairs", "experts", "routed experts"),
    "torch tower": Dependence("rows", _TOWER, "tower", "the vision tower"),
    "gated_delta.fla:chunk_gated_delta": Dependence(
        "neighbours", _UNSHOWN, "fla", "chunk_gated_delta by fla", "neighbours"
    ),
}
_BY_NOTHING = {
    "a program computes a row, or several apart": """moe.triton:route norms.triton:rms_norm
        norms.triton:gated_rms_norm norms.triton:gated_squares rope.triton:qk_norm_rope
        kv_write.triton:rotate_and_write kv_write.triton:write_kv elementwise.triton:silu_times
        elementwise.triton:times_sigmoid causal_conv.triton:causal_conv_prefill
        gated_delta.decoding_triton:gates gated_delta.mamba2_triton:step_lengths
        rope.halves_triton:rotate_halves""",
    "one tile for all rows, with one order over K": "linear.fixed_triton:product",
    "fixed parts of keys, merged in their order": "paged_attention.triton:attention_prefill",
    "a patch reads its own picture": "segment_attention.triton:segment_attention",
    "chunks end at absolute positions, one after another": "gated_delta.triton:chunk_gated_delta",
    "factors have one tile; their base is a product": """linear.low_rank_triton:reduced
        linear.low_rank_triton:extended""",
    "copies": "kv_write.triton:copy_kv_rows state_copy.triton:copy_runs",
    "samples rows, each from its own logits": "sampling.triton:sample_rows",
    "computes rows of answers alone": """paged_attention.triton:attention_decode
        gated_delta.decoding_triton:mix_decode gated_delta.triton:recurrent_gated_delta
        gated_delta.triton:verify_gated_delta gated_delta.triton:fold_gated_delta
        causal_conv.triton:causal_conv_decode causal_conv.triton:causal_conv_verify""",
}
OPS: Mapping[str, Dependence] = {
    **_BY_NUMBER,
    **{op: Dependence("nothing", why) for why, ops in _BY_NOTHING.items() for op in ops.split()},
}
"""By the implementation's module in `kernels/` and its function; torch's by what they compute."""


def parts_of(spec: ModelSpec, config: EngineConfig) -> frozenset[Part]:
    """Return what a model and its options have of what decides which ops run."""
    stored = spec.quantization is not None or config.quantization is not None
    found: dict[Part, bool] = {
        # The head and what is not quantised stay plain.
        "plain": True,
        "codes": stored,
        "experts": spec.routing is not None,
        "tower": spec.vision is not None,
        "adapters": bool(config.lora_modules) or config.reserve_loras,
        "fla": config.gpu_kernels == "fla",
    }
    return frozenset({"any", *(part for part, has in found.items() if has)})


def blamed(parts: Set[Part], *, fixed: bool) -> Iterator[str]:
    """Yield what gives a prompt's row other bits in other company, and why, once each.

    `parts`: of the model and its options; `fixed`: with fixed tiles.
    """
    seen = set[str]()
    for op in OPS.values():
        on = op.fixed if fixed else op.on
        if on != "nothing" and op.part in parts and op.name not in seen:
            seen.add(op.name)
            of = "the number of rows" if on == "rows" else "the rows beside it"
            yield f"{op.name} ({of})"
