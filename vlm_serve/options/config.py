"""Options of the engine, from which flags, file keys, variables and the documents' table follow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlm_serve.options.declared import explains_keywords, normalise_all, refuse, section

DEMO_BLOCK_SIZE = 16
DEFAULT_BLOCK_SIZE = 64
BLOCK_SIZES = (16, 32, 64, 128)
MAX_CHUNK = 64

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_KV_DTYPES = (*_DTYPES, "fp8", "int8")
_STATE_DTYPES = ("auto", "float32", "bfloat16")
_LIMIT = re.compile(r"(image|video)\s*=\s*(\d{1,6})", re.ASCII)
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?", re.ASCII)
_model = section("model")
_cache = section("cache")
_scheduler = section("scheduler")
_media = section("media")
_chat = section("chat")
_adapters = section("adapters")
_EXPERTS = ("none", "gate_up_proj", "down_proj", "all")


SEQUENCE_CHOICES = (8, 16, 32, 64, 128, 256)
"""Values of `max_num_seqs` among which an engine on a GPU chooses."""


class Fallback(int):
    """A default number, in place of which an engine on a GPU chooses one by its memory."""


@explains_keywords
@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine, validated together when it is built.

    `cache_memory` may be given as text ("1GiB") and becomes a number of bytes. The engine replaces
    `block_size=None` with its choice through `dataclasses.replace`, and so validates again.

    Raises:
        ConfigError: names every invalid option, not only the first one.
    """

    device: str = _model(
        "auto", "device of the model: auto (a GPU if there is one), cpu, cuda or cuda:N"
    )
    dtype: str = _model(
        "auto",
        "type of the weights in memory; auto: the checkpoint's type, but float32 on a CPU without "
        "compiled kernels",
        choices=_DTYPES,
    )
    compute_dtype: str = _model(
        "auto",
        "type of activations; compiled CPU kernels accept float32 with all weights, and bfloat16 "
        "with bfloat16 weights; auto: the fastest on this processor",
        choices=_DTYPES,
    )
    quantization: str | None = _model(
        None,
        "quantise the projections and experts of an unquantised checkpoint while loading; the head "
        "gets at least 6 bits",
        choices=("int8", "int6", "int4"),
        default_text="as in the checkpoint",
    )
    quantized_activations: str = _model(
        "auto",
        "quantise activations for int8, int6 and int4 weights, per row and group; auto: int8 with "
        "compiled kernels on processors with byte dot products, else none",
        choices=("auto", "none", "int8"),
    )
    task: str = _model(
        "auto",
        "what is made of prompts: generate answers; embed makes vectors of their last token "
        "(/v1/embeddings), rerank scores pairs by yes and no (/v1/rerank, /v1/score), classify "
        "labels prompts (/classify); auto: classify for classifiers and reward models, else "
        "generate",
        choices=("auto", "generate", "embed", "rerank", "classify"),
    )
    revision: str | None = _model(
        None,
        "branch, tag or commit of a model that is named by its hub id",
        default_text="the hub's main branch",
    )
    mmproj: str | None = _model(
        None,
        "GGUF file of the vision tower, beside a model in a GGUF file; none: text alone",
        metavar="FILE|none",
        default_text="the one in the model's folder",
    )
    generation_config: str = _model(
        "auto",
        "defaults of sampling: auto takes the checkpoint's generation_config.json, vllm takes "
        "neutral ones, and a folder holds another such file",
        metavar="auto|vllm|DIR",
    )
    max_logprobs: int = _model(
        20, "maximum log-probabilities that a request may ask for per token", low=0, high=1000
    )
    max_model_len: int | None = _model(
        None,
        "maximum length of prompt plus answer, in tokens",
        low=1,
        default_text="the checkpoint's context",
    )
    allow_long_max_model_len: bool = _model(
        False,
        "accept a max_model_len beyond the checkpoint's context (with YaRN, the extended one); "
        "answers may get worse there",
    )
    rope_scaling: Mapping[str, Any] | None = _model(
        None,
        "fields of the language model's rotary positions, for longer contexts: "
        '`{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}`; '
        "others stay as in config.json",
        metavar="JSON",
    )
    hf_overrides: Mapping[str, Any] | None = _model(
        None,
        "fields in place of config.json's, nested ones merged; one without effect is refused",
        aliases=("json_model_override_args",),
        metavar="JSON",
    )
    deterministic: bool = _model(
        False,
        "give an answer the same bits in every batch, behind every hit; slower on a GPU",
        aliases=("batch_invariant",),
    )
    allow_weight_updates: bool = _model(
        False, "let weights change while the engine runs; on a CPU, from safetensors"
    )
    threads: int | None = _model(
        None, "CPU threads for the model", low=1, high=1024, default_text="torch's choice"
    )
    tensor_parallel_size: int = _model(
        1,
        "processes that split the model by heads, columns of feed-forwards and experts, and "
        "vocabulary; on GPUs, one process per GPU",
        low=1,
        high=64,
        aliases=("tp",),
    )
    stall_timeout: float = _model(
        120.0,
        "seconds without a step despite pending work until /health returns 503; also the time that "
        "the processes of one model wait for each other before the engine stops",
        low=0.001,
        high=3600,
        metavar="SECONDS",
    )
    cuda_graphs: bool | None = _model(
        None,
        "on a GPU, run short steps and small pictures as CUDA graphs, captured at start",
        default_text="on with a GPU",
    )
    kernel_check: bool = _model(
        True, "on a GPU, compare kernels with torch at start-up; refuse to serve with wrong ones"
    )
    gpu_kernels: str = _model("own", "kernels on a GPU; fla: fla-core's", choices=("own", "fla"))
    compiled_kernels: bool | None = _model(
        None,
        "on a CPU, use native kernels: the installed wheel's, or compiled at the first start",
        default_text="on if the wheel has some, or with a C++ compiler",
    )
    native_kernels: str = _model(
        "auto",
        "auto: the installed wheel's, compiled where none fit this processor; build: compiled here",
        choices=("auto", "build"),
    )
    enable_prefix_caching: bool = _cache(
        True, "reuse KV and state of shared prefixes (text and media)"
    )
    block_size: int | None = _cache(
        None,
        "tokens per KV block",
        choices=BLOCK_SIZES,
        default_text=f"{DEMO_BLOCK_SIZE} for the demo models, else {DEFAULT_BLOCK_SIZE}",
    )
    cache_memory: int | str | None = _cache(
        None,
        "memory for KV blocks and state snapshots in total, such as 512MiB or 4GiB",
        low=1,
        default_text="a share of free memory, printed at start-up",
    )
    kv_cache_dtype: str = _cache(
        "auto",
        "type of stored keys and values; auto is compute_dtype",
        choices=_KV_DTYPES,
        aliases=("kv_dtype",),
    )
    state_dtype: str = _cache(
        "auto", "type of stored recurrent state; auto is float32", choices=_STATE_DTYPES
    )
    prefix_cache_state_interval: int | None = _cache(
        None,
        "blocks between regular state snapshots of a long prompt",
        low=1,
        aliases=("state_interval",),
        default_text="the blocks of 1024 tokens",
    )
    prefix_cache_state_budget: int | None = _cache(
        None,
        "snapshot rows, in addition to one live row per running sequence; 0: idle live rows only",
        low=0,
        default_text="half of the cache memory, at most one row a block",
    )
    prefix_cache_decode_state_interval: int = _cache(
        0,
        "tokens between state snapshots while decoding, a multiple of the block size; 0: none",
        low=0,
    )
    prefix_cache_places: str = _cache(
        "learned", "regular snapshots: where prompts part, or fixed", choices=("learned", "fixed")
    )
    prefix_cache_answer_ends: str = _cache(
        "auto",
        "keep states at the ends of answers for next turns: auto (where it pays), always, off",
        choices=("auto", "always", "off"),
    )
    expert_replay: str = _cache(
        "best_effort",
        "requests for routed experts, at cached tokens without recorded experts: best_effort "
        "reuses and reports these tokens, complete recomputes them",
        choices=("best_effort", "complete"),
    )
    host_cache_memory: int | str = _cache(
        0,
        "host memory for evicted cache entries, which return to the cache on demand",
        low=0,
        default_text="none",
    )
    disk_cache_path: str | None = _cache(
        None, "folder for entries evicted from host memory; they survive a restart", metavar="DIR"
    )
    disk_cache_size: int | str = _cache(
        10 << 30, "maximum size of the entries in disk_cache_path", low=1
    )
    shared_store: str | None = _cache(
        None,
        "store shared by servers of one model, below all other tiers: redis://HOST:PORT/DB, or "
        "rediss:// with TLS; valkey:// and valkeys:// are equivalent",
        metavar="URL",
    )
    shared_store_key_file: str | None = _cache(
        None,
        "file of at least 32 secret bytes, the same for all servers of the store, which ignore "
        "entries written without it; required unless the store is on this machine",
        metavar="FILE",
    )
    shared_store_insecure: bool = _cache(
        False, "connect to a shared store on another machine without TLS"
    )
    shared_store_timeout: float = _cache(
        1.0,
        "seconds that a request may wait for the shared store, for lookups and reads in total",
        low=0.001,
        high=60,
        metavar="SECONDS",
    )
    shared_store_ttl: int = _cache(
        24 * 3600,
        "seconds until an unused entry of the shared store expires",
        low=60,
        high=365 * 24 * 3600,
        metavar="SECONDS",
    )
    shared_store_write: str = _cache(
        "stable",
        "entries to write to the shared store: media (up to the ends of media, of the system "
        "prompt and of prefixes that two prompts share, and up to cache marks), stable (also up "
        "to the ends of turns), all (up to every snapshot)",
        choices=("media", "stable", "all"),
    )
    shared_store_write_bandwidth: int | str = _cache(
        256 << 20, "maximum write rate to the shared store, in bytes per second", low=1
    )
    idle_sleep: float | None = _cache(
        None,
        "seconds without a request after which the cache's memory goes back to the system, and its "
        "content to lower tiers; the next request wakes the engine; on a CPU, on one rank",
        low=0.001,
        metavar="SECONDS",
        default_text="never",
    )
    cache_audit: float = _cache(
        0.0,
        "fraction (0 to 1) of greedy requests with a hit to repeat cold, in the background, and "
        "compare",
        low=0.0,
        high=1.0,
        metavar="RATE",
    )
    max_num_seqs: int = _scheduler(
        Fallback(8),
        "maximum number of concurrently running sequences",
        low=1,
        high=4096,
        default_text="8; on a GPU up to 256, as its memory allows",
    )
    max_num_batched_tokens: int = _scheduler(
        Fallback(2048),
        "maximum tokens per step, prefill and decode in total",
        low=1,
        default_text="2048; 8192 on a GPU with 16 GiB beside the weights",
    )
    step_time_target: float | None = _scheduler(
        None,
        "target duration of a step in milliseconds, reached by fewer prompt tokens per step, but "
        "at least 256, or 1024 for a single request; 0: no target",
        low=0.0,
        high=60_000,
        default_text="25; on a GPU four times a measured step without prompts, 25 to 200",
        metavar="MS",
    )
    speculative: str = _scheduler(
        "auto",
        "source of draft tokens for speculative decoding: suffix finds them in the sequence's own "
        "text, in a request's prediction and in earlier answers to the same tenant; mtp takes them "
        "from the checkpoint's multi-token-prediction layer; auto: suffix on a CPU with compiled "
        "kernels, else off. Drafts never change the output",
        choices=("auto", "off", "suffix", "mtp", "mtp,suffix"),
    )
    speculative_tokens: int = _scheduler(
        7,
        "maximum drafts per sequence and step (N); up to 2N + 1 while few sequences run",
        low=1,
        high=32,
    )
    allowed_local_media_path: str | None = _media(
        None, "folder from which file:// URLs may load media", metavar="DIR"
    )
    allowed_media_domains: tuple[str, ...] = _media(
        (),
        "hosts from which media may be fetched (comma-separated)",
        default_text="every public host",
    )
    allow_private_networks: bool = _media(False, "also fetch media from non-public addresses")
    limit_mm_per_prompt: str = _media(
        "",
        "maximum images and videos per prompt, such as image=4,video=1",
        metavar="LIMITS",
        default_text="none",
    )
    max_image_pixels: int = _media(
        1 << 26,
        "maximum pixels of an image, checked in its header before decoding",
        low=1,
        high=178_956_970,
    )
    media_fetch_timeout: float = _media(
        30.0,
        "time limit for fetching one medium, redirects included, in seconds",
        low=0.001,
        high=3600,
        metavar="SECONDS",
    )

    chat_template: str | None = _chat(
        None,
        "file of a chat template in Jinja, instead of the checkpoint's own",
        metavar="FILE",
        default_text="the checkpoint's",
    )
    chat_template_kwargs: Mapping[str, Any] | None = _chat(
        None,
        "default variables of the chat template, such as '{\"enable_thinking\": false}'; a "
        "request's own take precedence",
        aliases=("default_chat_template_kwargs",),
    )
    thinking_budget_message: str = _chat(
        "",
        "text that ends a thought whose budget of tokens is used up, before </think>",
        default_text="none",
    )
    lora_modules: tuple[str, ...] = _adapters(
        (),
        "LoRA adapters: name=path of PEFT's folder, GGUF file or hub id; several with commas, with "
        "spaces or as JSON",
        metavar="NAME=PATH",
        pairs=("name", "path"),
    )
    max_loras: int = _adapters(8, "adapters laid out at once; others wait", low=1, high=256)
    max_lora_rank: int = _adapters(64, "largest rank of an adapter's modules", low=1, high=256)
    reserve_loras: bool = _adapters(False, "room on a GPU for adapters loaded after the start")
    lora_experts: str = _adapters(
        "none", "weights of routed experts that adapters may change", choices=_EXPERTS
    )
    lora_dtype: str = _adapters("auto", "type of factors; auto: their files'", choices=_DTYPES)

    def __post_init__(self) -> None:
        problems = normalise_all(self)
        if isinstance(self.limit_mm_per_prompt, str) and self.max_media_per_prompt is None:
            got = repr(self.limit_mm_per_prompt)
            problems.append(f"limit_mm_per_prompt must be of the form image=4,video=1, got {got}")
        if isinstance(self.device, str) and not _DEVICE.fullmatch(self.device):
            problems.append(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        if not problems:  # The next checks compare options of valid values.
            problems += self._conflicts()
        refuse(problems)

    def _conflicts(self) -> list[str]:
        """Return the conflicts between options whose values are valid, one line each."""
        problems = []
        # Unknown before the checkpoint is read; the smallest block demands the least.
        block_size = self.block_size or min(BLOCK_SIZES)
        least = self.max_num_seqs + block_size
        if self.max_num_batched_tokens < least:
            problems.append(
                f"max_num_batched_tokens must be at least max_num_seqs + block_size = {least}, "
                f"got {self.max_num_batched_tokens}"
            )
        if self.prefix_cache_decode_state_interval % block_size:
            problems.append(
                f"prefix_cache_decode_state_interval must be a multiple of the block size "
                f"{block_size}, got {self.prefix_cache_decode_state_interval}"
            )
        return problems

    @property
    def cache_memory_bytes(self) -> int | None:
        """`cache_memory` in bytes; None lets the engine choose."""
        assert self.cache_memory is None or isinstance(self.cache_memory, int)
        return self.cache_memory

    @property
    def max_media_per_prompt(self) -> dict[str, int] | None:
        """`limit_mm_per_prompt` as numbers by modality; None if it is malformed."""
        return read_media_limits(self.limit_mm_per_prompt)

    @property
    def chunk_size(self) -> int:
        """Most tokens of a chunk of a prefill; the block size must be known."""
        assert self.block_size is not None, "resolve block_size first"
        return min(MAX_CHUNK, self.block_size)

    @property
    def state_interval_blocks(self) -> int:
        """`prefix_cache_state_interval`, by default the blocks of 1 024 tokens."""
        assert self.block_size is not None, "resolve block_size first"
        return self.prefix_cache_state_interval or max(1, 1024 // self.block_size)


def read_media_limits(text: str) -> dict[str, int] | None:
    """Return the most media of a prompt by modality; None if the text is malformed.

    Args:
        text: such as `image=4,video=1`, or the JSON object that vLLM takes.
    """
    limits: dict[str, int] = {}
    text = text.strip()
    if text.startswith("{"):
        text = text.strip("{}").replace('"', "").replace(":", "=")
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _LIMIT.fullmatch(part)
        if match is None or match[1] in limits:
            return None
        limits[match[1]] = int(match[2])
    return limits
