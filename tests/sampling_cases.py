"""Random steps of sampling, all kinds of rows, for the kernels and for their rule by torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from vlm_serve.kernels.sampling import DRAWN, GREEDY, REPORT, Found, Mark, Rows
from vlm_serve.kernels.sampling import triton as sampling
from vlm_serve.kernels.sampling.reference import PROMPT

MOST, NAMED = 5, 40
"""Likeliest tokens that a row tells, and named ones."""


class Case:
    """Random rows of all kinds.

    Args:
        seed: of the numbers.
        count: rows of the logits, each with up to two of a step.
        vocab: columns.
        level: the logits are multiples of it, so that many are equal; 0 for any.
    """

    def __init__(self, seed: int, count: int, vocab: int, level: float = 0.0) -> None:
        rng, generator = random.Random(seed), np.random.default_rng(seed)
        logits = generator.normal(0, rng.choice([0.3, 2.0, 6.0]), (count, vocab))
        if level:
            logits = np.round(logits / level) * level
        self.logits = torch.from_numpy(logits.astype(np.float32))
        self.counts = torch.zeros(3, vocab, dtype=torch.int32)
        for slot in range(3):
            for token in generator.integers(0, vocab, 20).tolist():
                self.counts[slot, token] += rng.choice([1, 3, PROMPT])
        self.counts.clamp_(max=PROMPT + 100)
        marks, reports, numbers = list[Mark](), list[Mark](), list[list[float]]()
        ids, values = list[int](), list[float]()
        slots = [0, 1, 2]
        for line in range(count):
            kind = rng.choice([GREEDY, DRAWN, DRAWN, DRAWN])
            changed = rng.random() < 0.4
            slot = slots.pop() if changed and slots else -1
            first = len(ids)
            if changed:
                some = sorted(rng.sample(range(vocab), rng.choice([0, 1, 4, 9])))
                ids += some
                values += [rng.choice([-100.0, -2.5, 3.0, 40.0]) for _ in some]
            told = rng.random() < 0.3
            likeliest = rng.randint(1, MOST) if told else 0
            end = len(ids)
            named = rng.sample(range(vocab), rng.choice([0, 2, NAMED])) if told else []
            ids += named
            values += [0.0] * len(named)
            top_k = rng.choice([0, 0, 0, 1, 5, 20, 40, 100, vocab, vocab + 3])
            mark = Mark(
                line,
                kind,
                top_k,
                slot,
                rng.choice([-1, -2, 7]) if slot >= 0 else -1,
                rng.choice([-1, -1, 0, 1]),
                first,
                end,
                likeliest + int(told),
                int(changed),
                end,
                len(ids),
            )
            marks.append(mark)
            if told:
                reports.append(Mark(line, REPORT, likeliest, told=line))
            top_p = rng.choice([2.0, 2.0, 0.95, 0.5, 1e-300])
            min_p = rng.choice([0.0, 0.0, 0.0, 0.1, 0.01, 1.0])
            temperature = rng.choice([1.0, 0.7, 0.1, 1.9]) if kind == DRAWN else 1.0
            penalties = rng.choice([1.0, 1.3]), rng.choice([0.0, 1.5]), rng.choice([0.0, 0.1])
            numbers.append([temperature, top_p, min_p, rng.random(), *penalties, 0.0])
        numbers += [[1.0, 2.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0] for _ in reports]
        masks = generator.integers(0, 256, (2, -(-vocab // 8)), dtype=np.uint8)
        masks[1] = 0
        masks[1, :2] = 255
        self.rows = Rows(
            torch.tensor(numbers, dtype=torch.float64),
            torch.tensor([*marks, *reports], dtype=torch.int32),
            torch.from_numpy(masks),
            torch.tensor([*ids, 0], dtype=torch.int32),
            torch.tensor([*values, 0.0]),
            torch.tensor([rng.randrange(vocab) for _ in [*marks, *reports]]),
        )
        self.own = count

    def keep(self, rows: int) -> None:
        """Ask for the first rows alone."""
        parts = self.rows._asdict()
        parts |= {name: parts[name][:rows] for name in ("numbers", "marks", "before")}
        self.rows, self.own = Rows(**parts), rows

    def sampled(self, by: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        """Ids, log-probabilities, following tokens and counts."""
        own = self.own
        shape = 2, own, 1 + MOST + NAMED
        found = Found(torch.zeros(shape, dtype=torch.int32), torch.zeros(own).long())
        counts = self.counts.clone()
        by(self.logits, self.rows, counts, found, **options)
        return found.tokens[0], found.tokens[1].view(torch.float32), found.following, counts


@contextmanager
def small(**sizes: int) -> Iterator[None]:
    """Let the kernels have other tiles, bins and lists: small vocabularies then show all that large
    ones do. The interpreter adapts Triton's language once for a
    module, not at each call of a function."""
    adapt, adapted = interpreter._patch_lang, dict[int, Any]()
    constants = {name: tl.constexpr(size) for name, size in sizes.items()}

    def adapt_once(function: Any) -> Mock:
        module = id(function.__globals__)
        if module not in adapted:
            adapted[module] = adapt(function)
        return Mock()

    try:
        with (
            patch.object(interpreter, "_patch_lang", adapt_once),
            patch.multiple(sampling, **constants),
        ):
            yield
    finally:
        for scope in reversed(adapted.values()):
            scope.restore()
