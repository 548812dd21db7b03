"""Writes a checkpoint's GGUF files as llama.cpp's converter does, with `gguf`'s own writer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_blocks import PLAIN, encode
from safetensors.torch import load_file
from tokenizers import Tokenizer

Array = npt.NDArray[np.float32]
Choice = Callable[[str, tuple[int, ...]], Kind]

ARCHITECTURES = {
    "qwen3_5": "qwen35",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "qwen3_vl": "qwen3vl",
    "qwen3_vl_moe": "qwen3vlmoe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "qwen2": "qwen2",
    "qwen2_vl": "qwen2vl",
    "qwen2_5_vl": "qwen2vl",
}
_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
_VISION = {
    "pos_embed": "v.position_embd",
    "patch_embed.proj": "v.patch_embd",
    "merger.norm": "v.post_ln",
    "merger.linear_fc1": "mm.0",
    "merger.linear_fc2": "mm.2",
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
    "linear_fc1": "fc1",
    "linear_fc2": "fc2",
    "norm": "norm",
    # Of Qwen2-VL and Qwen2.5-VL.
    "merger.ln_q": "v.post_ln",
    "merger.mlp.0": "mm.0",
    "merger.mlp.2": "mm.2",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_PREDICTOR = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
}


WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "shared_intermediate_size": 256,
    "gdn_key_dim": 64,
    "gdn_value_dim": 64,
}
"""Sizes of a checkpoint most of whose rows are made of blocks of 256."""


def plain(name: str, shape: tuple[int, ...]) -> Kind:
    """Everything as float32."""
    return Kind.F32


def blocks(kind: Kind, others: Kind = Kind.F32) -> Choice:
    """Matrices in one type of blocks, where their rows are made of such; all others as `others`."""
    size = gguf.GGML_QUANT_SIZES[kind][0]

    def chosen(name: str, shape: tuple[int, ...]) -> Kind:
        whole = len(shape) > 1 and shape[-1] % size == 0
        kept = re.search(r"ssm_conv1d|ffn_gate_inp|ssm_(alpha|beta|ba)\b", name)
        return kind if whole and not kept else others if len(shape) > 1 else Kind.F32

    return chosen


def read(checkpoint: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config and all tensors."""
    tensors: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        tensors |= load_file(file)
    return json.loads((checkpoint / "config.json").read_text()), tensors


def with_published_windows(checkpoint: Path) -> Path:
    """A checkpoint whose tower, if it is Qwen2.5-VL's, has the windows of the published ones, which
    files do not name."""
    config, _ = read(checkpoint)
    if config["model_type"] == "qwen2_5_vl":
        config["vision_config"]["window_size"] = 112
        (checkpoint / "config.json").write_text(json.dumps(config))
    return checkpoint


def write_model(
    checkpoint: Path,
    target: Path,
    choice: Choice = plain,
    *,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    more: Iterable[tuple[str, Array]] = (),
) -> Path:
    """The language model as a file; `change` may add metadata, and `more` are further tensors."""
    config, tensors = read(checkpoint)
    text = config.get("text_config", config)
    predicts = any(name.startswith("mtp.") for name in tensors)
    writer = gguf.GGUFWriter(target, ARCHITECTURES[config["model_type"]])
    writer.add_type("model")
    writer.add_string("general.basename", checkpoint.name)
    _sizes(writer, text, config, predictors=int(predicts))
    _tokenizer(writer, checkpoint, text["vocab_size"], config["model_type"])
    change(writer)
    for name, values in [*text_tensors(config, tensors), *more]:
        _add(writer, name, values, choice)
    return _close(writer, target)


def write_whole(checkpoint: Path, target: Path) -> Path:
    """The language model and its tower in one file, as Ollama's converter writes them."""
    config, tensors = read(checkpoint)
    vision = config["vision_config"]
    preprocessor = json.loads((checkpoint / "preprocessor_config.json").read_text())
    prefix = f"{ARCHITECTURES[config['model_type']]}.vision."

    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in (
            ("block_count", vision["depth"]),
            ("embedding_length", vision["hidden_size"]),
            ("attention.head_count", vision["num_heads"]),
            ("num_channels", vision["in_channels"]),
            ("patch_size", vision["patch_size"]),
            ("spatial_merge_size", vision["spatial_merge_size"]),
            ("temporal_patch_size", vision["temporal_patch_size"]),
            ("shortest_edge", preprocessor["size"]["shortest_edge"]),
            ("longest_edge", preprocessor["size"]["longest_edge"]),
        ):
            writer.add_uint32(prefix + key, value)
        if vision.get("deepstack_visual_indexes"):
            writer.add_array(
                f"{prefix}deepstack_visual_indexes", vision["deepstack_visual_indexes"]
            )
        for key in ("image_mean", "image_std"):
            writer.add_array(prefix + key, preprocessor[key])

    return write_model(checkpoint, target, change=change, more=list(_inner_tower(tensors)))


def _inner_tower(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, Array]]:
    for name, tensor in tensors.items():
        if ".visual." not in name:
            continue
        own, values = "v." + name.partition(".visual.")[2], _numbers(tensor)
        for theirs, ours in (
            ("patch_embed.proj", "patch_embed"),
            ("blocks", "blk"),
            ("attn.qkv", "attn_qkv"),
            ("attn.proj", "attn_out"),
            ("deepstack_merger_list", "deepstack_merger"),
        ):
            own = own.replace(theirs, ours)
        if own == "v.patch_embed.weight":
            yield own, values.reshape(-1, *values.shape[2:])
        elif "attn_qkv" in own:
            for part, third in zip("qkv", np.split(values, 3), strict=True):
                yield own.replace("attn_qkv", f"attn_{part}"), third
        else:
            yield own, values


def write_tower(
    checkpoint: Path, target: Path, choice: Choice = plain, *, bounds: bool = True
) -> Path:
    """The vision tower as a file, with or without the bounds of the checkpoint's pictures."""
    config, tensors = read(checkpoint)
    vision = config["vision_config"]
    preprocessor = json.loads((checkpoint / "preprocessor_config.json").read_text())
    writer = gguf.GGUFWriter(target, "clip")
    writer.add_type("mmproj")
    writer.add_string("general.basename", checkpoint.name)
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_patch_size(vision["patch_size"])
    # As in the converter: of Qwen2-VL's tower this is the decoder's width.
    wide = vision.get("intermediate_size", vision["hidden_size"])
    writer.add_vision_embedding_length(vision.get("embed_dim", vision["hidden_size"]))
    writer.add_vision_feed_forward_length(wide)
    writer.add_vision_block_count(vision["depth"])
    writer.add_vision_head_count(vision["num_heads"])
    writer.add_vision_projection_dim(vision.get("out_hidden_size", vision["hidden_size"]))
    writer.add_vision_image_mean(preprocessor["image_mean"])
    writer.add_vision_image_std(preprocessor["image_std"])
    features = vision.get("deepstack_visual_indexes", [])
    if config["model_type"] in ("qwen2_vl", "qwen2_5_vl"):
        _rotary_tower(writer, vision, gated=config["model_type"] == "qwen2_5_vl")
        size = {each: preprocessor[each] for each in ("min_pixels", "max_pixels")}
    else:
        writer.add_clip_projector_type("qwen3vl_merger")
        writer.add_vision_use_gelu(True)
        side = round(vision["num_position_embeddings"] ** 0.5)
        writer.add_vision_image_size(side * vision["patch_size"])
        writer.add_vision_spatial_merge_size(vision["spatial_merge_size"])
        writer.add_vision_is_deepstack_layers([i in features for i in range(vision["depth"])])
        size = preprocessor["size"]
    if bounds:
        low, high = size.values()
        writer.add_vision_min_pixels(low)
        writer.add_vision_max_pixels(high)
    for name, values in vision_tensors(features, tensors):
        _add(writer, name, values, choice)
    return _close(writer, target)


def _rotary_tower(writer: gguf.GGUFWriter, vision: Mapping[str, Any], *, gated: bool) -> None:
    """Write what files of Qwen2-VL's and Qwen2.5-VL's towers say: windows by their period alone."""
    writer.add_clip_projector_type("qwen2.5vl_merger" if gated else "qwen2vl_merger")
    writer.add_vision_image_size(560)
    writer.add_vision_attention_layernorm_eps(1e-6)
    if gated:
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)


def copy(source: Path, target: Path, change: Callable[[Any], tuple[Array, Kind]]) -> Path:
    """A file with the same metadata, and tensors that `change` makes of the reader's."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(key, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values, kind = change(tensor)
        writer.add_tensor(tensor.name, encode(values, kind), raw_dtype=kind)
    return _close(writer, target)


def split(source: Path, count: int) -> list[Path]:
    """A file in parts, as llama.cpp splits it."""
    reader = gguf.GGUFReader(source)
    paths = [source.with_name(f"{source.stem}-{i + 1:05}-of-{count:05}.gguf") for i in range(count)]
    for index, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
        if index == 0:
            for key, field in reader.fields.items():
                if not key.startswith(("GGUF.", "general.architecture")):
                    inner = field.types[1] if len(field.types) > 1 else None
                    writer.add_key_value(key, field.contents(), field.types[0], inner)
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", count)
        for tensor in reader.tensors[index::count]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        _close(writer, path)
    return paths


def _close(writer: gguf.GGUFWriter, target: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add(writer: gguf.GGUFWriter, name: str, values: Array, choice: Choice) -> None:
    kind = choice(name, values.shape)
    if kind not in PLAIN and len(values.shape) < 2:
        raise ValueError(name)
    writer.add_tensor(name, encode(values, kind), raw_dtype=kind)


def _sizes(
    writer: gguf.GGUFWriter, text: Mapping[str, Any], config: Mapping[str, Any], predictors: int
) -> None:
    writer.add_block_count(text["num_hidden_layers"] + predictors)
    if predictors:
        writer.add_nextn_predict_layers(predictors)
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    if "intermediate_size" in text:
        writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    if "head_dim" in text:
        writer.add_key_length(text["head_dim"])
        writer.add_value_length(text["head_dim"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    writer.add_rope_freq_base(rope.get("rope_theta", text.get("rope_theta")))
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "num_experts" in text:
        writer.add_expert_count(text["num_experts"])
        writer.add_expert_used_count(text["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(text["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in text:
        writer.add_expert_shared_feed_forward_length(text["shared_expert_intermediate_size"])
    if "linear_num_key_heads" in text:
        _state(writer, text, rope, predictors)
    if config["model_type"].startswith("qwen3_vl"):
        features = config["vision_config"]["deepstack_visual_indexes"]
        writer.add_num_deepstack_layers(len(features))


def _state(
    writer: gguf.GGUFWriter, text: Mapping[str, Any], rope: Mapping[str, Any], predictors: int
) -> None:
    writer.add_ssm_conv_kernel(text["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(text["linear_key_head_dim"])
    writer.add_ssm_group_count(text["linear_num_key_heads"])
    heads = text["linear_num_value_heads"]
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * text["linear_value_head_dim"])
    interval = text.get("full_attention_interval", 4)
    writer.add_full_attention_interval(interval)
    kinds = text.get("layer_types") or [
        "linear_attention" if (i + 1) % interval else "full_attention"
        for i in range(text["num_hidden_layers"])
    ]
    recurrent = [kind == "linear_attention" for kind in kinds] + [False] * predictors
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    share = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    writer.add_rope_dimension_count(int(text["head_dim"] * share))


def _tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, vocab_size: int, family: str) -> None:
    """The vocabulary. As in the converter, added tokens that look special are CONTROL."""
    backend = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    raw = json.loads((checkpoint / "tokenizer.json").read_text())
    added = backend.get_added_tokens_decoder()
    tokens, types = [], []
    for index in range(vocab_size):
        token = backend.id_to_token(index)
        looks = token is not None and token.startswith("<|") and token.endswith("|>")
        if token is None:
            kind = gguf.TokenType.UNUSED
        elif index not in added:
            kind = gguf.TokenType.NORMAL
        elif added[index].special or looks:
            kind = gguf.TokenType.CONTROL
        else:
            kind = gguf.TokenType.USER_DEFINED
        tokens.append(f"[PAD{index}]" if token is None else token)
        types.append(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35" if family.startswith("qwen3_5") else "qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = raw["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template((checkpoint / "chat_template.jinja").read_text())


def _numbers(tensor: torch.Tensor) -> Array:
    found: Array = tensor.float().numpy()
    return found


def text_tensors(
    config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, Array]]:
    """The language model's tensors under the names of files."""
    text = config.get("text_config", config)
    experts: dict[str, dict[int, Array]] = {}
    for name, tensor in sorted(tensors.items()):
        if ".visual." in f".{name}":
            continue
        own = name.replace("model.language_model.", "").removeprefix("model.")
        if own.startswith("mtp.layers.0."):
            own = f"layers.{text['num_hidden_layers']}.{own.removeprefix('mtp.layers.0.')}"
        elif own.startswith("mtp."):
            # The norms of models with such layers are centred.
            part = own.removeprefix("mtp.").removesuffix(".weight")
            place = f"blk.{text['num_hidden_layers']}.nextn.{_PREDICTOR[part]}.weight"
            yield place, _numbers(tensor) + (0 if part == "fc" else 1)
            continue
        one = re.fullmatch(r"(layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+)_proj\.weight", own)
        if one:
            experts.setdefault(f"{one[1]}.{one[3]}", {})[int(one[2])] = _numbers(tensor)
            continue
        yield from _text_tensor(config["model_type"], text, own, _numbers(tensor))
    for place, found in experts.items():
        layer, kind = place.split(".")[1], place.rpartition(".")[2]
        yield f"blk.{layer}.ffn_{kind}_exps.weight", np.stack([found[i] for i in sorted(found)])


def _text_tensor(
    family: str, text: Mapping[str, Any], own: str, values: Array
) -> Iterator[tuple[str, Array]]:
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", own)
    start, part = (f"blk.{match[1]}.", match[2]) if match else ("", own)
    stem, _, end = part.rpartition(".")
    centred = family.startswith(("qwen3_5", "qwen3_next"))
    if centred and part.endswith("norm.weight") and stem != "linear_attn.norm":
        values = values + 1
    if part == "mlp.experts.gate_up_proj":
        values = values.swapaxes(1, 2) if family == "qwen3_vl_moe" else values
        half = values.shape[1] // 2
        yield f"{start}ffn_gate_exps.weight", values[:, :half]
        yield f"{start}ffn_up_exps.weight", values[:, half:]
    elif part == "mlp.experts.down_proj":
        turned = values.swapaxes(1, 2) if family == "qwen3_vl_moe" else values
        yield f"{start}ffn_down_exps.weight", turned
    elif part == "linear_attn.in_proj_qkvz.weight":
        yield from _apart(start, text, values)
    elif part == "post_attention_layernorm.weight":
        yield f"{start}{'post_attention_norm' if centred else 'ffn_norm'}.weight", values
    elif stem == "linear_attn" or part.startswith(
        ("linear_attn.in", "linear_attn.c", "linear_attn.o")
    ):
        values = _tiled(text, part, values) if family.startswith("qwen3_5") else values
        if part == "linear_attn.A_log":
            yield f"{start}ssm_a", _numbers(-torch.from_numpy(values).exp())
        elif part == "linear_attn.dt_bias":
            yield f"{start}ssm_dt.bias", values
        else:
            yield f"{start}{_NAMES[stem]}.{end}", values.squeeze(1) if "conv" in part else values
    else:
        yield f"{start}{_NAMES[stem]}.{end}", values


def _apart(start: str, text: Mapping[str, Any], values: Array) -> Iterator[tuple[str, Array]]:
    """Rows of query, key, value and z, which lie together by key heads."""
    heads, dim = text["linear_num_key_heads"], text["linear_key_head_dim"]
    each = text["linear_num_value_heads"] // heads * text["linear_value_head_dim"]
    parts = np.split(values.reshape(heads, -1, values.shape[1]), np.cumsum([dim, dim, each]), 1)
    q, k, v, z = (part.reshape(-1, values.shape[1]) for part in parts)
    yield f"{start}attn_qkv.weight", np.concatenate([q, k, v])
    yield f"{start}attn_gate.weight", z


def _tiled(text: Mapping[str, Any], part: str, values: Array) -> Array:
    """Value heads in the order of ggml's broadcasts."""
    keys, heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
    kind = part.removeprefix("linear_attn.").removesuffix(".weight")
    single = kind in ("in_proj_a", "in_proj_b", "A_log", "dt_bias")
    size = 1 if single else text["linear_value_head_dim"]
    first = 2 * keys * text["linear_key_head_dim"] if kind in ("in_proj_qkv", "conv1d") else 0
    order = np.arange(heads * size).reshape(keys, heads // keys, size).swapaxes(0, 1).reshape(-1)
    order = np.concatenate([np.arange(first), first + order])
    return values[:, order] if kind == "out_proj" else values[order]


def vision_tensors(
    features: list[int], tensors: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, Array]]:
    """The vision tower's tensors under the names of files."""
    for name, tensor in sorted(tensors.items()):
        if ".visual." not in f".{name}":
            continue
        own, values = name.rpartition("visual.")[2], _numbers(tensor)
        stem, _, end = own.rpartition(".")
        block = re.fullmatch(r"(blocks|deepstack_merger_list)\.(\d+)\.(.+)", stem)
        if own == "patch_embed.proj.weight":
            yield "v.patch_embd.weight", values[:, :, 0]
            yield "v.patch_embd.weight.1", values[:, :, 1]
        elif ".attn.qkv." in own and name.startswith("visual."):
            for part, third in zip("qkv", np.split(values, 3), strict=True):
                yield f"v.blk.{own.split('.')[1]}.attn_{part}.{end}", third
        elif block and block[1] == "blocks":
            yield f"v.blk.{block[2]}.{_VISION[block[3]]}.{end}", values
        elif block:
            place = features[int(block[2])]
            yield f"v.deepstack.{place}.{_VISION[block[3]]}.{end}", values
        else:
            yield f"{_VISION[stem]}.{end}", values
