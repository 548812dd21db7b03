"""Options of the engine. The field list below is the single table from which the command line,
config files, environment variables and the README's table are made."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vlm_serve import media_options, shared_store_options
from vlm_serve.options import normalise_all, option, refuse

BLOCK_SIZES = (16, 32, 64, 128)
DEMO_BLOCK_SIZE = 16
DEFAULT_BLOCK_SIZE = 64
MAX_GDN_CHUNK = 64

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_KV_DTYPES = (*_DTYPES, "fp8", "int8")
_STATE_DTYPES = ("auto", "float32", "bfloat16")
_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,3})?", re.ASCII)

_MODEL = "model"
_CACHE = "cache"
_SCHEDULER = "scheduler"


@dataclass(frozen=True)
class EngineConfig:
    """Options of one engine, validated together when it is built.

    `cache_memory` may be given as text ("1GiB"); afterwards it is a number of bytes. The engine
    replaces `block_size=None` by the number it chose (with `dataclasses.replace`, which validates
    again).

    Raises:
        ConfigError: names every option whose value is bad, not only the first one.
    """

    device: str = option(
        "auto",
        "where the model runs: auto (a GPU if there is one), cpu, cuda or cuda:N",
        group=_MODEL,
        kind="text",
    )
    dtype: str = option(
        "auto",
        "type of weights in memory; auto: the checkpoint's own, but float32 on a CPU without "
        "compiled kernels",
        group=_MODEL,
        kind="text",
        choices=_DTYPES,
    )
    compute_dtype: str = option(
        "auto",
        "type of activations; compiled CPU kernels take float32 beside any weights, and bfloat16 "
        "beside bfloat16 ones; auto: what the processor is best at",
        group=_MODEL,
        kind="text",
        choices=_DTYPES,
    )
    quantization: str | None = option(
        None,
        "quantise a plain checkpoint's projections and experts while it is loaded; the head gets 6 "
        "bits at least",
        group=_MODEL,
        kind="text",
        choices=("int8", "int6", "int4"),
        default_text="as the checkpoint has them",
    )
    quantized_activations: str = option(
        "auto",
        "quantise activations beside int8, int6 and int4 weights, per row and group; auto: int8 "
        "with compiled kernels where the processor sums products of bytes, else none",
        group=_MODEL,
        kind="text",
        choices=("auto", "none", "int8"),
    )
    max_model_len: int | None = option(
        None,
        "longest prompt plus answer, in tokens",
        group=_MODEL,
        kind="int",
        low=1,
        default_text="the checkpoint's context",
    )
    deterministic: bool = option(
        False,
        "make prefill logits bit-identical between a cache hit and a cold run; costs some speed",
        group=_MODEL,
        kind="bool",
    )
    threads: int | None = option(
        None,
        "CPU threads for the model",
        group=_MODEL,
        kind="int",
        low=1,
        high=1024,
        default_text="torch's choice",
    )
    tensor_parallel_size: int = option(
        1,
        "processes that share the model: heads, columns of feed-forwards and experts, vocabulary; "
        "on GPUs, one each",
        group=_MODEL,
        kind="int",
        low=1,
        high=64,
        aliases=("tp",),
    )
    stall_timeout: float = option(
        120.0,
        "seconds without a step, although there is work, after which /health says 503; and that "
        "the processes of one model wait for each other before the engine ends",
        group=_MODEL,
        kind="float",
        low=0.001,
        high=3600,
        metavar="SECONDS",
    )
    cuda_graphs: bool | None = option(
        None,
        "on a GPU, run decode steps and short prefills from CUDA graphs, captured at start-up",
        group=_MODEL,
        kind="bool",
        default_text="on with a GPU",
    )
    compiled_kernels: bool | None = option(
        None,
        "on a CPU, compute with kernels that the first start compiles",
        group=_MODEL,
        kind="bool",
        default_text="on with a C++ compiler",
    )
    enable_prefix_caching: bool = option(
        True,
        "reuse KV and state of equal prefixes (text and media)",
        group=_CACHE,
        kind="bool",
    )
    block_size: int | None = option(
        None,
        "tokens per KV block",
        group=_CACHE,
        kind="int",
        choices=BLOCK_SIZES,
        default_text=f"{DEMO_BLOCK_SIZE} for the demo models, else {DEFAULT_BLOCK_SIZE}",
    )
    cache_memory: int | str | None = option(
        None,
        "memory for KV blocks and state snapshots together, such as 512MiB or 4GiB",
        group=_CACHE,
        kind="size",
        low=1,
        metavar="SIZE",
        default_text="a share of free memory, printed at start-up",
    )
    kv_cache_dtype: str = option(
        "auto",
        "type in which keys and values are stored; auto is compute_dtype",
        group=_CACHE,
        kind="text",
        choices=_KV_DTYPES,
        aliases=("kv_dtype",),
    )
    state_dtype: str = option(
        "auto",
        "type in which recurrent state is stored; auto is float32",
        group=_CACHE,
        kind="text",
        choices=_STATE_DTYPES,
    )
    prefix_cache_state_interval: int | None = option(
        None,
        "distance of the regular state snapshots of a long prompt, in blocks",
        group=_CACHE,
        kind="int",
        low=1,
        aliases=("state_interval",),
        default_text="the blocks of 1024 tokens",
    )
    prefix_cache_state_budget: int | None = option(
        None,
        "snapshot rows beyond one live row per running sequence; 0 borrows idle live rows only",
        group=_CACHE,
        kind="int",
        low=0,
        default_text="half of the cache memory",
    )
    prefix_cache_decode_state_interval: int = option(
        0,
        "tokens between state snapshots while decoding, a multiple of the block size; 0: none",
        group=_CACHE,
        kind="int",
        low=0,
    )
    expert_replay: str = option(
        "best_effort",
        "cached tokens whose routed experts are unknown, when a request asks for them: best_effort "
        "reuses and reports them, complete computes them again",
        group=_CACHE,
        kind="text",
        choices=("best_effort", "complete"),
    )
    host_cache_memory: int | str = option(
        0,
        "host memory below the cache memory: what is evicted stays there and comes up on demand",
        group=_CACHE,
        kind="size",
        low=0,
        metavar="SIZE",
        default_text="none",
    )
    disk_cache_path: str | None = option(
        None,
        "folder for what host memory has no room for either; it survives a restart",
        group=_CACHE,
        kind="text",
        metavar="DIR",
    )
    disk_cache_size: int | str = option(
        10 << 30,
        "most bytes of the entries in disk_cache_path",
        group=_CACHE,
        kind="size",
        low=1,
        metavar="SIZE",
    )
    shared_store: str | None = shared_store_options.URL
    shared_store_key_file: str | None = shared_store_options.KEY_FILE
    shared_store_insecure: bool = shared_store_options.INSECURE
    shared_store_timeout: float = shared_store_options.TIMEOUT
    shared_store_ttl: int = shared_store_options.TTL
    shared_store_write: str = shared_store_options.WRITE
    shared_store_write_bandwidth: int | str = shared_store_options.WRITE_BANDWIDTH
    cache_audit: float = option(
        0.0,
        "share (0 to 1) of the greedy requests with a hit that are run again cold, in the "
        "background, and compared",
        group=_CACHE,
        kind="float",
        low=0.0,
        high=1.0,
        metavar="RATE",
    )
    max_num_seqs: int = option(
        8,
        "most sequences that run at the same time",
        group=_SCHEDULER,
        kind="int",
        low=1,
        high=4096,
    )
    max_num_batched_tokens: int = option(
        2048,
        "most tokens in one step, prefill and decode together",
        group=_SCHEDULER,
        kind="int",
        low=1,
    )
    step_time_target: float = option(
        25.0,
        "milliseconds that a step is to take: where more prompt tokens would take longer, it takes "
        "fewer, but at least 256, and 1024 for one request alone; 0: no target",
        group=_SCHEDULER,
        kind="float",
        low=0.0,
        high=60_000,
        metavar="MS",
    )
    speculative: str = option(
        "auto",
        "where drafts of the next tokens come from, several of which one step verifies: suffix "
        "finds them in the sequence's own text, in a request's prediction and in earlier answers "
        "to the same tenant; mtp takes them from the checkpoint's multi-token-prediction layer; "
        "auto: suffix on a CPU with compiled kernels, else off. Drafts change no token",
        group=_SCHEDULER,
        kind="text",
        choices=("auto", "off", "suffix", "mtp", "mtp,suffix"),
    )
    speculative_tokens: int = option(
        7,
        "most drafts of a sequence in one step; twice as many and one while few sequences run",
        group=_SCHEDULER,
        kind="int",
        low=1,
        high=32,
    )
    allowed_local_media_path: str | None = media_options.LOCAL_PATH
    allowed_media_domains: tuple[str, ...] = media_options.DOMAINS
    allow_private_networks: bool = media_options.PRIVATE_NETWORKS
    limit_mm_per_prompt: str = media_options.LIMITS
    max_image_pixels: int = media_options.IMAGE_PIXELS
    media_fetch_timeout: float = media_options.FETCH_TIMEOUT

    def __post_init__(self) -> None:
        problems = normalise_all(self)
        if isinstance(self.limit_mm_per_prompt, str) and self.max_media_per_prompt is None:
            problems.append(
                "limit_mm_per_prompt must be of the form image=4,video=1, "
                f"got {self.limit_mm_per_prompt!r}"
            )
        if isinstance(self.device, str) and not _DEVICE.fullmatch(self.device):
            problems.append(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
        if not problems:  # the checks below compare options that are valid by themselves
            problems += self._conflicts()
        refuse(problems)

    def _conflicts(self) -> list[str]:
        problems = []
        # Unknown until the checkpoint is known; the smallest one is the weakest demand.
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
        """`cache_memory` in bytes, None if the engine is to choose."""
        assert self.cache_memory is None or isinstance(self.cache_memory, int)
        return self.cache_memory

    @property
    def max_media_per_prompt(self) -> dict[str, int] | None:
        """`limit_mm_per_prompt` as numbers by modality; None if it cannot be read."""
        return media_options.read_limits(self.limit_mm_per_prompt)

    @property
    def gdn_chunk_size(self) -> int:
        """Tokens per chunk of the gated delta rule; the block size must be known."""
        assert self.block_size is not None, "resolve block_size first"
        return min(MAX_GDN_CHUNK, self.block_size)

    @property
    def state_interval_blocks(self) -> int:
        """`prefix_cache_state_interval`, or the blocks of 1 024 tokens."""
        assert self.block_size is not None, "resolve block_size first"
        return self.prefix_cache_state_interval or max(1, 1024 // self.block_size)
