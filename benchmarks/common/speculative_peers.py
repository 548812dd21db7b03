"""llama.cpp on the same weights, prompts and forms, with and without drafts from n-grams."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.engine_gguf import ConversionError, convert
from common.engine_peers import LlamaCpp, find_llama, llama
from common.engine_server import Unavailable
from vlm_serve.sampling_params import SamplingParams

DRAFTERS: dict[str, Mapping[str, object]] = {
    "none": {},
    "ngram-simple, 3 and 7": {
        "--spec-type": "ngram-simple",
        "--spec-ngram-simple-size-n": 3,
        "--spec-ngram-simple-size-m": 7,
    },
    "ngram-simple, 12 and 48": {"--spec-type": "ngram-simple"},
    "ngram-map-k": {"--spec-type": "ngram-map-k"},
}
"""Flags of its sources of drafts: with lengths like ours, and as it comes."""


@dataclass(frozen=True)
class Asked:
    """What our engine was asked in one round, one request at a time, and the seconds that a token
    took it with drafts."""

    kind: str
    prompt: Sequence[int]
    params: SamplingParams
    seconds: float


def print_peers(
    source: str | None, checkpoint: Path, dtype: str, asked: Sequence[Asked], threads: int
) -> None:
    """Milliseconds a token by kind of answers, and ours beside them."""
    kinds = list(dict.fromkeys(each.kind for each in asked))
    try:
        tree, binary = find_llama(source)
        with tempfile.TemporaryDirectory() as folder:
            model = convert(tree, checkpoint, dtype, Path(folder))
            rows = [("vlm-serve, suffix", _medians(kinds, asked, [each.seconds for each in asked]))]
            for name, flags in DRAFTERS.items():
                with llama(binary, model, length=1024, threads=threads, more=flags) as server:
                    seconds = [_ask(server, each) for each in asked]
                rows.append((f"llama.cpp, {name}", _medians(kinds, asked, seconds)))
    except (Unavailable, ConversionError) as error:
        print(f"llama.cpp takes no part: {error}")
        return
    print(f"| ms a token | {' | '.join(kinds)} |")
    print("|---|" + "---|" * len(kinds))
    for name, medians in rows:
        print(f"| {name} | {' | '.join(f'{1000 * each:.1f}' for each in medians)} |")


def _medians(kinds: list[str], asked: Sequence[Asked], seconds: list[float]) -> list[float]:
    pairs = list(zip(asked, seconds, strict=True))
    return [statistics.median(each for a, each in pairs if a.kind == kind) for kind in kinds]


def _ask(server: LlamaCpp, asked: Asked) -> float:
    """Seconds of a token, as it tells them: of generation alone."""
    params = asked.params
    body: dict[str, Any] = {
        "prompt": list(asked.prompt),
        "n_predict": params.max_tokens,
        "temperature": params.temperature,
        "seed": params.seed or 0,
        "logit_bias": [[token, bias] for token, bias in (params.logit_bias or {}).items()],
        "ignore_eos": params.ignore_eos,
        "cache_prompt": True,
    }
    if params.structured_outputs is not None:
        body["grammar"] = params.structured_outputs.grammar
    answer, _ = server.server.post("/completion", body)
    times = answer["timings"]
    return float(times["predicted_ms"] / 1000 / max(1, times["predicted_n"]))
