"""What near relatives of the supported models have that is missing here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS = {
    "audio; take Qwen3-VL, or MiniCPM-V 4.6": """audio_config enable_audio_output minicpmo
        phi4_multimodal qwen2_5_omni qwen2_audio qwen3_asr qwen3_omni qwen3_omni_moe voxtral""",
    "Mamba's recurrence; take Qwen3.5": """mamba_d_conv mamba_d_state mamba_num_heads bamba
        falcon_h1 falcon_mamba granitemoehybrid jamba mamba mamba2 nemotron_h nemotron_h_omni zamba
        zamba2""",
    "short convolutions in place of attention; take Qwen3.5": """conv_L_cache conv lfm2 lfm2_moe
        lfm2_vl lfm3 lfm3_vl""",
    "a decay per channel (KDA) and compressed keys (MLA); take Qwen3.5": """bailing_hybrid glm5_next
        kimi_k3 kimi_linear""",
    "linear attention without a delta rule; take Qwen3.5": "minimax minimax_text_01 rwkv xlstm",
    "negative eigenvalues of its delta rule, and norms behind its layers; take Qwen3.5": (
        "olmo_hybrid"
    ),
    "sparse attention, whose keys an index chooses; take Qwen3.8": """index_n_heads index_topk
        index_topk_blocks deepseek_v32 deepseek_v4 dots3_note glm_moe_dsa minimax_m3_vl
        qwen4_exp=Qwen3.8-Flash-Next""",
    "compressed keys (MLA); take Qwen3-VL": """kv_lora_rank deepseek_v2 deepseek_v3 deepseek_vl_v2
        glm4_moe_lite kimi_k2 kimi_k25 kimi_vl longcat_flash minicpm3 mistral4""",
    "sliding windows; take Qwen3-VL": """sliding_attention hybrid_sliding cohere2 exaone4 gemma2
        gemma3 gemma3n gemma4 gpt_oss inkling inkling2 mellum mimo_v2_flash ministral muse_glimmer
        olmo3 step3p5 step3p7 zaya""",
    "partial rotations with norms behind its layers; take Qwen3-VL": """glm4 glm46v glm4v glm4v_moe
        glm_ocr""",
    "a tower with windows; take Qwen3-VL": "qwen2_5_vl=Qwen2.5-VL",
    "another vision tower; take Qwen3-VL": """vision_config cosmos3_edge cosmos3_omni deepseek_ocr2
        deepseek_vl granite4_vision hunyuan_vl idefics3 internvl internvl_chat keye lighton_ocr
        llava llava_next llava_onevision minicpmv mistral3 mllama molmo molmo2 ovis2 paddleocr_vl
        paligemma qianfan_ocr qwen2_vl=Qwen2-VL smolvlm video_llama_3""",
    "no norms of queries and keys; take Qwen3": """granite llama llama4 ministral3 mistral mixtral
        phi3 qwen2 qwen2_moe seed_oss smollm3 solar_open""",
    "norms over all heads, or biases of its router; take Qwen3": """ernie4_5 ernie4_5_moe glm4_moe
        minimax_m2 olmo2""",
}
"""What a model has, by `model_type` of config.json, with a name for it if it has another one, or by
a field or a name in `layer_types` that an unknown type has. The first kind counts."""


def missing_of(config: Mapping[str, Any]) -> str:
    """Return the sentence about what the model of a config.json has that is missing here; "" if
    nobody knows."""
    kind, inner = str(config.get("model_type")).removesuffix("_text"), config.get("text_config")
    sections = [config, inner if isinstance(inner, Mapping) else {}]
    marks = {name for section in sections for name, value in section.items() if value}
    for names in (section.get("layer_types") for section in sections):
        marks.update(map(str, names) if isinstance(names, list) else ())
    for known in ({kind}, marks):
        for has, types in KINDS.items():
            names = dict(name.partition("=")[::2] for name in types.split())
            if not known.isdisjoint(names):
                name = names.get(kind) or kind.replace("_", "-").capitalize()
                return f": {name} has {has}"
    return ""
