"""Fields of quantisation configurations: those passed over and those refused, with the reason.

`Fields.finish` refuses every other unread field. A field may be passed over only if no value of it
changes the meaning of the file's tensors.
"""

from __future__ import annotations

from collections.abc import Mapping


def _names(reasons: Mapping[str, str]) -> dict[str, str]:
    """Return the reason by field; the argument has lists of fields by reason."""
    return {name: reason for reason, names in reasons.items() for name in names.split()}


_SEARCH = "how the quantiser found scales and codes, which the file stores"
_WRITER = "who wrote the file"
_LOADING = "how another program loads or multiplies the weights"
_TENSORS = "the file's tensors show it, and their shapes and dtypes are checked"
_UNQUANTISED = "quantised activations, keys and values are reported and not followed"

_ACTIVATIONS = """act_group_size act_sym act_dynamic act_data_type static_kv_granularity
    static_attention_granularity"""
_INTEGERS = {
    # AutoRound writes its own fields into the configurations of GPTQ and AWQ too.
    _SEARCH: """act_group_aware activation_weighted_mse amp batch_size cache_block_outputs
        damp_auto_increment damp_percent dataset enable_alg_ext enable_minmax_tuning
        enable_norm_bias_tuning enable_quanted_input failsafe fallback foem gptaq
        gradient_accumulate_steps hessian hyb_act iters low_gpu_mem_usage lr max_input_length
        minmax_lr model_free model_seqlen mse n_samples nsamples pad_token_id seqlen static_groups
        tokenizer train_bs true_sequential""",
    _WRITER: "autoround_version meta model_file_base_name model_name_or_path",
    _LOADING: """disable_exllama do_fuse exllama_config fuse_max_seq_len modules_to_fuse
        use_cuda_fp16 use_exllama""",
    _TENSORS: """block_name_to_quantize ignore lm_head module_name_preceding_first_block
        modules_in_block_to_quantize quant_block_list scale_dtype supported_types
        to_quant_block_names""",
    _UNQUANTISED: _ACTIVATIONS,
}

PASSED_OVER: Mapping[str, Mapping[str, str]] = {
    "fp8": _names({_LOADING: "dequantize", _TENSORS: "modules_to_convert"}),
    "gptq": _names(
        {
            **_INTEGERS,
            _LOADING: f"{_INTEGERS[_LOADING]} backend",
            _TENSORS: f"{_INTEGERS[_TENSORS]} modules_to_not_convert",
        }
    ),
    "awq": _names({**_INTEGERS, _TENSORS: f"{_INTEGERS[_TENSORS]} zero_point"}),
    "auto-round": _names(_INTEGERS),
    "compressed-tensors": _names(
        {
            _WRITER: "global_compression_ratio version",
            _LOADING: "dequantize run_compressed use_optimized_inference",
        }
    ),
    "compressed-tensors: config_groups": {},
    "compressed-tensors: weights": _names(
        {_SEARCH: "observer observer_kwargs", _TENSORS: "scale_dtype zp_dtype"}
    ),
    "compressed-tensors: sparsity_config": _names(
        {
            "a format of `dense` stores zeros like other values": (
                "global_sparsity ignore registry_requires_subclass sparsity_structure targets"
            )
        }
    ),
    "compressed-tensors: transform_config": {},
    "compressed-tensors: transform_config.config_groups": _names(
        {
            "the stored weights are transformed already": (
                "head_dim precision randomize requires_grad type"
            )
        }
    ),
    "compressed-tensors: transform_config.config_groups.apply": _names(
        {"the stored weights are transformed already": "ignore inverse targets"}
    ),
    "modelopt": _names(
        {_WRITER: "producer", _UNQUANTISED: "kv_cache_quantized_layers kv_cache_schema_version"}
    ),
    "modelopt: quantized_layers": {},
    "modelopt: config_groups": _names({"`quant_algo` or `quantized_layers` decides": "targets"}),
    "modelopt: weights": _names(
        {
            "`quant_algo` or `quantized_layers` decides": (
                "dynamic group_size num_bits strategy symmetric type"
            )
        }
    ),
    # Of any format: input_activations, output_activations and kv_cache_scheme.
    "activations": _names(
        {
            _SEARCH: "observer observer_kwargs",
            _UNQUANTISED: (
                "actorder block_structure group_size scale_dtype strategy symmetric zp_dtype"
            ),
        }
    ),
    "gguf": {},
}
"""The reason by section of a configuration and field."""

REFUSED: Mapping[str, str] = _names(
    {
        "it asks for an operation on activations": (
            "hadamard_config pre_quant_scale rotation rotation_config spinquant_config "
            "transform_config"
        ),
        "it adds a low-rank product to the weights": "adapter lora_rank",
        "scales are quantised too": "super_bits super_group_size super_sym",
        "its tensors have another layout": "is_marlin_format",
        "layers have different numbers of experts": "moe_sparsity_config",
    }
)
"""The reason by field of any section, for the message; any other unknown field is refused too."""
