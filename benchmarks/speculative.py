"""Compare decoding with and without drafts, in turns on one engine, by kind of answer.

    python benchmarks/speculative.py [checkpoint] [--rounds 5] [--dtype float32] [--peers]

Prompts are new in every round; what repeats is made by real means (`common/speculative_forms.py`):

- JSON records: lines with the same keys. Drafts come from the answer itself.
- copies: a page that stands in the prompt, with other words here and there.
- video answers: one object in a fixed form, of which earlier rounds have given some.
- again: a question answered before.
- prose: a person's, which hardly repeats anything but words.
- free text: drawn at temperature 1 from the whole vocabulary; nothing ever comes again.

Every round runs each of them with and without drafts, batch by batch, and compares the tokens.
Times are of decoding alone, from the first token of the last sequence on. The bound is what steps
of that many rows allow if every draft holds: t(B) (K + 1) / t(B (K + 1)), as measured at start; K
is `--drafts`. Where few sequences run each may have more; their bound comes behind the share. A
second table has a factor for each part of what is left of that bound: for what nobody can know of a
form's choices, for drafts that did not hold or were not made (and the rows saved by
that), for the model's time beside that of as many rows at start, and for the time outside of the
model.
With `--peers` llama.cpp answers the same prompts in the same forms, with and without its drafts
from n-grams, over HTTP; LLAMA_SOURCE says where it is, as for `engine_cpu.py`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from operator import add
from pathlib import Path

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import torch
from checkpoint_spec import LARGER_SPEC
from common.machine import add_isa_argument, describe, run_as
from common.speculative_forms import FORMS, Form
from common.speculative_losses import HEADINGS, Meter, Spent, bound, losses
from common.speculative_peers import Asked, print_peers
from make_checkpoint import make_checkpoint
from parity_cases import random_ids

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.features.drafts.drafting import Drafting
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.options.config import EngineConfig
from vlm_serve.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
FREE = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, ignore_eos=True)
PROMPT_TOKENS = 64
KINDS = (*FORMS, "again", "free text")


class Batch:
    """Requests that run together; the time from when all have their first token.

    Attributes:
        tokens: of each request.
        spent: by all its decoding.
    """

    def __init__(self, engine: Engine, meter: Meter, count: int) -> None:
        self._engine, self._meter = engine, meter
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self._begun = self._unfinished = count
        self._begin = self.spent = Spent()
        self._done = threading.Event()

    def run(self, prompts: list[list[int]], params: list[SamplingParams]) -> float:
        """Seconds of a decoded token of one sequence."""
        prepare = self._engine.preprocessor.prepare_tokens
        for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            self._engine.submit(prepare(prompt), each, lambda delta, i=index: self._push(i, delta))
        assert self._done.wait(600)
        return self.spent.seconds / (sum(map(len, self.tokens)) / len(self.tokens) - 1)

    def _push(self, index: int, delta: Delta) -> None:
        own = self.tokens[index]
        if not own and delta.token_ids:
            self._begun -= 1
            if not self._begun:
                self._begin = self._meter.now()
        own += delta.token_ids
        if delta.finish_reason is not None:
            assert delta.error is None
            self._unfinished -= 1
            if not self._unfinished:
                self.spent = self._meter.now() - self._begin
                self._done.set()


@contextmanager
def without_drafts(engine: Engine) -> Iterator[None]:
    """Steps as an engine without drafts would plan them."""
    hooks = engine._scheduler.hooks
    drafts, hooks.plan_drafts = hooks.plan_drafts, []
    try:
        yield
    finally:
        hooks.plan_drafts = drafts


class Workload:
    """One kind of answers at one batch size."""

    def __init__(self, engine: Engine, meter: Meter, kind: str, batch: int, tokens: int) -> None:
        self._engine, self.kind, self.batch, self._most = engine, kind, batch, tokens
        self._meter = meter
        self._turn = 0
        self._forms: list[Form] = []
        self._known = [0, 0]
        self.ratios: list[float] = []
        self.plain: list[float] = []
        self.alone: list[Asked] = []
        self.batches: list[tuple[Batch, Batch]] = []

    def forget(self) -> None:
        """What has been measured so far was to warm up."""
        for found in (self.ratios, self.plain, self.alone, self.batches):
            found.clear()
        self._known = [0, 0]

    def spent(self) -> tuple[Spent, Spent]:
        """By all steps without and with drafts."""
        drafted, plain = zip(*self.batches, strict=True)
        return _sum(plain), _sum(drafted)

    def steps(self) -> str:
        """Tokens of a sequence in a step with drafts, and milliseconds of steps without and with
        them."""
        plain, drafted = self.spent()
        held = plain.steps / drafted.steps
        return f"{plain.a_step()} | {held:.2f} in {drafted.a_step()}"

    def losses(self) -> list[float]:
        """See `speculative_losses.losses`."""
        meter, (tokens, steps) = self._meter, self._known
        most = meter.most_of(self.batch)
        known = tokens / steps / most if steps else 1.0
        return losses(*self.spent(), known=known, costs=meter.costs, batch=self.batch, most=most)

    def asked(self) -> tuple[list[list[int]], list[SamplingParams]]:
        """The next round's prompts, and what is asked of them."""
        self._turn += 1
        first = 1000 * self._turn + 100 * self.batch
        seeds = range(first, first + self.batch)
        prompts = [random_ids(PROMPT_TOKENS, seed) for seed in seeds]
        if self.kind not in FORMS:
            params = FREE if self.kind == "free text" else GREEDY
            return prompts, [replace(params, max_tokens=self._most, seed=seed) for seed in seeds]
        tokenizer = self._engine.preprocessor.tokenizer
        self._forms = forms = [FORMS[self.kind](seed) for seed in seeds]
        for prompt, form in zip(prompts, forms, strict=True):
            prompt += tokenizer.encode_plain(form.source)
        return prompts, [form.params(tokenizer, self._most) for form in forms]

    def round(self) -> None:
        """With and without drafts, which see nothing of the answers without; the answers must be
        the same."""
        engine, (prompts, params) = self._engine, self.asked()
        if self.kind == "again":
            Batch(engine, self._meter, self.batch).run(prompts, params)
        drafted, plain = (Batch(engine, self._meter, self.batch) for _ in range(2))
        seconds = drafted.run(prompts, params)
        with without_drafts(engine):
            without = plain.run(prompts, params)
        assert drafted.tokens == plain.tokens, "drafts have changed a token"
        self.ratios.append(without / seconds)
        self.plain.append(without)
        self.batches.append((drafted, plain))
        self._count_known(drafted.tokens)
        if self.batch == 1:
            self.alone.append(Asked(self.kind, prompts[0], params[0], seconds))

    def _count_known(self, answers: list[list[int]]) -> None:
        """Steps that would do for answers of a form if it were drafted as far as it tells."""
        tokenizer = self._engine.preprocessor.tokenizer
        for form, tokens in zip(self._forms, answers, strict=bool(self._forms)):
            pieces = [tokenizer.token_bytes(token).decode() for token in tokens]
            self._known[0] += len(tokens) - 1
            self._known[1] += form.known(pieces, self._meter.most_of(self.batch))


def _sum(batches: Iterable[Batch]) -> Spent:
    return reduce(add, (batch.spent for batch in batches))


def measure(path: Path, options: argparse.Namespace) -> list[Asked]:
    """Prints what was measured; returns what was asked one request at a time."""
    config = EngineConfig(
        dtype=options.dtype,
        compute_dtype=options.compute_dtype,
        cache_memory="512MiB",
        max_num_seqs=8,
        speculative="suffix",
        speculative_tokens=options.drafts,
        threads=options.threads,
    )
    engine = Engine.from_checkpoint(str(path), config)
    try:
        drafting = engine._features.get(Drafting)
        assert drafting is not None
        meter = Meter(engine)
        costs, most = meter.costs, meter.most
        print(f"weights {engine.config.dtype}, activations {engine.config.compute_dtype}")
        print("rows of a step, milliseconds:")
        print("  " + ", ".join(f"{rows}: {1000 * each:.1f}" for rows, each in costs._points))
        works = [
            Workload(engine, meter, kind, batch, options.tokens)
            for kind in options.kinds
            for batch in options.batches
        ]
        print("Steps: milliseconds (of these outside of the model: drafting + sampling).")
        print(
            "| answers | batch | ms a token without | speed-up (least .. most) | bound | share | "
            "bound of all drafts | steps without | with |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for work in works:
            for number in range(options.rounds + 1):
                work.round()
                if not number:
                    work.forget()
            allowed = bound(costs, work.batch, most)
            of_all = bound(costs, work.batch, meter.most_of(work.batch))
            median = statistics.median(work.ratios)
            seen = f"{median:.2f} ({min(work.ratios):.2f} .. {max(work.ratios):.2f})"
            print(
                f"| {work.kind} | {work.batch} | {1000 * statistics.median(work.plain):.1f} | "
                f"{seen} | {allowed:.2f} | {median / allowed:.2f} | {of_all:.2f} | "
                f"{work.steps()} |",
                flush=True,
            )
        print(f"\n| of the bound | batch | {' | '.join(HEADINGS)} |")
        print("|---|" + "---|" * (1 + len(HEADINGS)))
        for work in works:
            factors = " | ".join(f"{each:.2f}" for each in work.losses())
            print(f"| {work.kind} | {work.batch} | {factors} |")
        counts = drafting.counts
        share = counts.accepted_tokens / max(1, counts.draft_tokens)
        print(f"{counts.draft_tokens} drafts, of which {100 * share:.0f} % held")
        return [each for work in works for each in work.alone]
    finally:
        engine.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint", nargs="?", help="default: a random one, 330M parameters")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="at most 8")
    parser.add_argument("--drafts", type=int, default=7, help="--speculative-tokens")
    parser.add_argument("--dtype", default="auto", help="of weights")
    parser.add_argument("--compute-dtype", default="auto", help="of activations")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--peers", action="store_true", help="also llama.cpp, batch 1")
    parser.add_argument("--llama-source", help="its source tree with build/bin/llama-server")
    add_isa_argument(parser)
    options = parser.parse_args()
    run_as(options.isa)
    print(describe(options.threads or torch.get_num_threads()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.checkpoint or make_checkpoint(folder, LARGER_SPEC))
        asked = measure(path, options)
        if options.peers:
            dtype = "float32" if options.dtype == "float32" else "bfloat16"
            threads = options.threads or torch.get_num_threads()
            print_peers(options.llama_source, path, dtype, asked, threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
