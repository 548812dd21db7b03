"""Compare random requests to the real engine with cold runs.

    python benchmarks/random_requests.py [--requests 2000] [--seed 0] [--deterministic]
                                         [--speculative mtp,suffix] [--experts 8]

Small pools, a host tier and a disk tier, so that eviction, preemption and loading from below happen
all the time; several requests at once, text and pictures, two tenants. A request whose cached part
was all made by prefill must give the tokens of a cold engine (with --deterministic also the very
bits of the first logits). Elsewhere (parts made by decode steps) a first difference must be a near
tie of the cold run: a top-2 logit gap of at most 1e-4.

With --speculative the engine under test drafts, from what it has seen and from what the cold one
has answered (with mistakes), and requests are of all kinds: drawn, penalised, biased, with
grammars, stop strings, several choices and so on. There every answer must be the cold one's, token
by token: where steps are compiled, nothing else has to be allowed for.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import PIL.Image
import torch
from checkpoint_spec import CheckpointSpec
from guesses import Oracle, consult
from make_checkpoint import make_checkpoint
from parity import NEAR_TIE, greedy, tapped
from parity_cases import random_ids, user

from vlm_serve import EngineConfig, Pipeline
from vlm_serve.engine.features.drafts.drafting import Drafting
from vlm_serve.engine.requests.sequence import Sequence
from vlm_serve.pipeline.pipeline import Output
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.structured_outputs import StructuredOutputs

TOKENS = 12
BLOCKS, SNAPSHOTS = 60, 6


KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "n": 2},
    {"presence_penalty": 1.5, "repetition_penalty": 1.2},
    {"temperature": 0.8, "logit_bias": {7: 5.0, 9: -100.0}},
    {"bad_words": ("a", "the"), "min_tokens": 20},
    {"stop": ("e", "zzz"), "min_tokens": 3},
    {"temperature": 0.5, "logprobs": 3},
    {"structured_outputs": StructuredOutputs(regex="([ab]{3}c){9}")},
    {"allowed_token_ids": (5, 6, 7, 8), "temperature": 1.0},
    {"prompt_logprobs": 1},
    {"return_routed_experts": True},
)
"""Requests with drafts."""


class Traffic:
    """Prompts that share prefixes, pictures and earlier answers."""

    def __init__(self, pipe: Pipeline, seed: int) -> None:
        self._preprocessor = pipe.engine.preprocessor
        self._rng = random.Random(seed)
        self._texts = [random_ids(self._rng.randint(20, 300), i) for i in range(6)]
        self._pictures = [
            PIL.Image.effect_noise((64, 48 + 16 * i), 90).convert("RGB") for i in range(4)
        ]

    def prompt(self) -> Prompt:
        rng = self._rng
        salt = rng.choice(["", "", "tenant"])
        if rng.random() < 0.3:
            words = " ".join(rng.choice(["what", "where", "why", "red"]) for _ in range(6))
            parts: list[Any] = [
                {"type": "image", "image": picture}
                for picture in rng.sample(self._pictures, rng.randint(1, 2))
            ]
            return self._preprocessor.prepare([user(*parts, words)], cache_salt=salt)
        base = rng.choice(self._texts)
        ids = base[: rng.randint(1, len(base))] if rng.random() < 0.5 else base
        tail = random_ids(rng.randint(1, 60), rng.randrange(10**9))
        return self._preprocessor.prepare_tokens(ids + tail, cache_salt=salt)

    def learn(self, prompt: Prompt, output: Output) -> None:
        """Some answers become the beginning of later prompts."""
        if not prompt.spans and len(prompt) < 350 and self._rng.random() < 0.3:
            history = [*prompt.token_ids, *output.token_ids]
            self._texts[self._rng.randrange(len(self._texts))] = history


def watch_exactness(pipe: Pipeline) -> dict[int, bool]:
    """Sequence number -> everything it read was made by prefill; filled as sequences end."""
    queues = pipe.engine._scheduler.queues
    remove, exact = queues.remove, dict[int, bool]()

    def watching(sequence: Sequence) -> None:
        if sequence.lease is not None:
            exact[sequence.number] = sequence.lease.exact
        remove(sequence)

    queues.remove = watching  # type: ignore[method-assign]
    return exact


def run(checkpoint: Path, folder: Path, options: argparse.Namespace) -> Counter[str]:
    """Counts what happened. Raises AssertionError at the first wrong answer."""
    shared: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 16,
        "threads": 1,
        "deterministic": options.deterministic,
    }
    sizes = EngineConfig(cache_memory="16MiB", speculative=options.speculative, **shared)
    with Pipeline(checkpoint, sizes) as measure:
        memory = measure.engine.memory
    pool = BLOCKS * memory.block_bytes + SNAPSHOTS * memory.snapshot_bytes
    hot_config = EngineConfig(
        cache_memory=pool,
        prefix_cache_state_budget=SNAPSHOTS,
        max_num_seqs=5,
        host_cache_memory="512KiB",
        disk_cache_path=str(folder / "tier"),
        disk_cache_size="8MiB",
        speculative=options.speculative,
        prefix_cache_decode_state_interval=0 if options.speculative == "off" else 16,
        **shared,
    )
    counts: Counter[str] = Counter()
    cold_config = EngineConfig(cache_memory="64MiB", enable_prefix_caching=False, **shared)
    with Pipeline(checkpoint, hot_config) as hot, Pipeline(checkpoint, cold_config) as cold:
        traffic, exact = Traffic(hot, options.seed), watch_exactness(hot)
        while counts["requests"] < options.requests:
            prompts = [traffic.prompt() for _ in range(6)]
            if options.speculative != "off":
                drafted_round(hot, cold, prompts, counts, traffic)
                continue
            params = [greedy(TOKENS)] * len(prompts)
            exact.clear()
            with tapped(hot.engine) as tap:
                outputs = hot._run(iter(prompts), params)
                logits = tap.take()
            numbers = sorted(exact)
            for prompt, output, rows, number in zip(prompts, outputs, logits, numbers, strict=True):
                with tapped(cold.engine) as tap:
                    (expected,) = cold._run(iter([prompt]), params[:1])
                    reference = tap.take()[0]
                compare(output, rows, expected, reference, exact[number], options, counts)
                traffic.learn(prompt, output)
            hot.engine.check()
        stats = hot.engine.stats()
    counts["preemptions"] = stats["num_preemptions"]
    if stats["drafts"] is not None:
        counts["drafts"] = stats["drafts"]["draft_tokens"]
        counts["accepted drafts"] = stats["drafts"]["accepted_tokens"]
    for name in ("kv", "snapshot"):
        counts[f"evictions of {name}"] = stats["cache"]["evictions"][name]
    return counts


def drafted_round(
    hot: Pipeline, cold: Pipeline, prompts: list[Prompt], counts: Counter[str], traffic: Traffic
) -> None:
    """Requests of any kind, half of whose answers are known beforehand but for mistakes."""
    number = counts["requests"]
    rng, spec = random.Random(number), hot.engine.spec
    kinds = [kind for kind in KINDS if spec.routing or "return_routed_experts" not in kind]
    params = [
        SamplingParams(**{"max_tokens": 48, "temperature": 0.0, "seed": number} | rng.choice(kinds))
        for _ in prompts
    ]
    expected = [
        cold._run(iter([prompt]), [each])[0] for prompt, each in zip(prompts, params, strict=True)
    ]
    oracle = Oracle(number, mistakes=rng.choice([0.0, 0.1, 0.5]), vocabulary=spec.vocab_size)
    for prompt, answer in zip(prompts, expected, strict=True):
        if rng.random() < 0.5:
            oracle.tell(prompt.token_ids, [choice.token_ids for choice in answer.choices])
    drafting = hot.engine._features.get(Drafting)
    assert drafting is not None
    consult(hot.engine, oracle)
    outputs = hot._run(iter(prompts), params)
    drafting.drafters.remove(oracle)
    for prompt, each, output, other in zip(prompts, params, outputs, expected, strict=True):
        counts["requests"] += 1
        counts["cold"] += not output.usage.cached_tokens
        for tier, tokens in output.cache_report.tiers.items():
            counts[f"tokens from {tier}"] += tokens
        counts["drafted answers"] += output.usage.accepted_prediction_tokens > 0
        for one, reference in zip(output.choices, other.choices, strict=True):
            assert one.token_ids == reference.token_ids, f"another answer to {each}"
            assert one.text == reference.text and one.logprobs == reference.logprobs, str(each)
        assert output.prompt_logprobs == other.prompt_logprobs
        traffic.learn(prompt, output)
    hot.engine.check()


def compare(
    output: Output,
    logits: torch.Tensor,
    expected: Output,
    reference: torch.Tensor,
    exact: bool,
    options: argparse.Namespace,
    counts: Counter[str],
) -> None:
    counts["requests"] += 1
    if not output.usage.cached_tokens:
        counts["cold"] += 1
    for tier, tokens in output.cache_report.tiers.items():
        counts[f"tokens from {tier}"] += tokens
    counts["exact" if exact else "with decode-made parts"] += 1
    if options.deterministic and exact:
        assert torch.equal(logits[0], reference[0]), "other bits on an exact path"
    if output.token_ids == expected.token_ids:
        return
    first = [a == b for a, b in zip(output.token_ids, expected.token_ids, strict=True)].index(False)
    best = reference[first].topk(2).values
    assert not exact, "another token on an exact path"
    assert float(best[0] - best[1]) <= NEAR_TIE, "another token, and no near tie"
    counts["near ties"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", nargs="?", help="default: a small random one")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--speculative", default="off")
    parser.add_argument("--experts", type=int, default=0, help="of the random checkpoint")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = options.checkpoint or make_checkpoint(
            folder / "checkpoint",
            CheckpointSpec(num_experts=options.experts, mtp="mtp" in options.speculative),
        )
        for what, count in run(Path(checkpoint), folder, options).items():
            print(f"{what:<26}{count:>9}")


if __name__ == "__main__":
    main()
