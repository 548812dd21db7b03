"""Traffic of coding agents, made from published statistics.

The sources of the numbers:

- *TraceLab*: arXiv 2606.30560 and tracelab.cs.washington.edu, 4 265 sessions of two coding agents
  in daily use: requests by session, steps of tools by request, what a step appends and answers.
- *Pauses*: 783 000 gaps between the answers and the next requests of sessions of a production
  service (gitea.gahow.org/gahow/agentic-kvc, commit 41232f49).
- *The system prompt*: hpfreilabs.com/blog/anatomy-of-claude-code-session, every call of a session
  intercepted; its subagents get the same system prompt as the main agent.
- *Subagents*: anthropic.com/engineering/multi-agent-research-system, their number and calls, and
  anthropic.com/engineering/effective-context-engineering-for-ai-agents, what they hand back.

Nobody has published how often a request starts subagents, how many sessions a server has, or how
fast it answers; those numbers are chosen here and say so.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import exp, log

from benchmarks.common.reuse_workloads import ASSISTANT, SYSTEM, TOOL, USER, Asked, Message, Writer

SYSTEM_TOKENS = 19_000
"""System prompt and tools. Source: the system prompt."""
SUBAGENTS, SUBAGENT_CALLS, SUMMARY = (3, 5), (3, 10), (1_000, 2_000)
"""Subagents at once, tool calls of each, tokens that each hands back. Source: subagents."""
ANSWER_MEAN = 523
"""Tokens by step: 186.9 million in 357 161 steps. Source: TraceLab."""
WITH_SUBAGENTS = 0.05
"""Share of requests that start subagents. Chosen."""
COMPACTED = 65_536
"""Tokens from which a client begins anew with a summary. Chosen."""
SESSIONS = 12
"""Sessions at once. Chosen."""
TOKENS_A_SECOND = 50.0
"""Speed of answers. Chosen."""


class Quantiles:
    """A distribution by some of its quantiles; between them it is even on a logarithmic scale.

    Args:
        points: (share below, value), both ascending, from share 0 to share 1.
    """

    def __init__(self, *points: tuple[float, float]) -> None:
        self._shares = [share for share, _ in points]
        self._logs = [log(1 + value) for _, value in points]

    def draw(self, rng: random.Random) -> float:
        share = rng.random()
        place = max(1, bisect_left(self._shares, share))
        low, high = self._shares[place - 1 : place + 1]
        below, above = self._logs[place - 1 : place + 1]
        return exp(below + (above - below) * (share - low) / (high - low)) - 1


# Median, 90 % and so on as published; the least and the most are chosen around them.
REQUESTS = Quantiles((0, 1), (0.5, 1), (0.9, 18), (0.99, 137), (1, 200))
"""User's requests by session. Source: TraceLab."""
TOOL_STEPS = Quantiles((0, 0), (0.25, 0), (0.5, 1), (0.9, 20), (0.99, 86), (1, 120))
"""Steps that a tool's result starts, by request. Source: TraceLab."""
APPENDED = Quantiles((0, 50), (0.5, 951), (0.9, 5_300), (0.99, 27_300), (1, 40_000))
"""New tokens of a step's prompt, the answer before included, behind 32 000 to 64 000 known ones.
Source: TraceLab."""
PAUSES = Quantiles(
    (0, 0.1), (0.25, 0.69), (0.5, 1.6), (0.75, 8.6), (0.9, 44), (0.99, 738), (1, 1800)
)
"""Seconds between an answer and the next request, of tools and people. Source: pauses."""


@dataclass(frozen=True)
class Step:
    """One call of the model: the prompt, and its answer."""

    messages: tuple[Message, ...]
    answer: tuple[int, ...]


Agent = Iterator["Step | Sequence[Agent]"]
"""The steps of an agent in order. Subagents run side by side; their agent waits for all of them."""


class Agents:
    """Draws agents.

    Args:
        rng: for lengths and texts.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._write = rng, Writer(rng)
        self._system = Message(SYSTEM, (self._write.text(SYSTEM_TOKENS),))

    def session(self) -> Agent:
        """Yield the steps of one session with its user."""
        history = [self._system]
        for _ in range(round(REQUESTS.draw(self._rng))):
            history.append(Message(USER, (self._appended(0),)))
            if self._rng.random() < WITH_SUBAGENTS:
                call = self._answer()
                yield Step(tuple(history), call)
                helpers = [self._subagent() for _ in range(self._rng.randint(*SUBAGENTS))]
                yield helpers
                found = tuple(self._write.text(self._rng.randint(*SUMMARY)) for _ in helpers)
                history += [Message(ASSISTANT, (call,)), *(Message(TOOL, (one,)) for one in found)]
            yield from self._loop(history, round(TOOL_STEPS.draw(self._rng)))
            self._compact(history)

    def _subagent(self) -> Agent:
        history = [self._system, Message(USER, (self._appended(0),))]
        yield from self._loop(history, self._rng.randint(*SUBAGENT_CALLS))

    def _loop(self, history: list[Message], calls: int) -> Iterator[Step]:
        """Yield a step for each result of a tool, and the first one; the answers join the
        history."""
        for place in range(calls + 1):
            answer = self._answer()
            yield Step(tuple(history), answer)
            history.append(Message(ASSISTANT, (answer,)))
            if place < calls:
                history.append(Message(TOOL, (self._appended(len(answer)),)))
                self._compact(history)

    def _compact(self, history: list[Message]) -> None:
        length = sum(
            len(part) for each in history for part in each.parts if isinstance(part, tuple)
        )
        if length > COMPACTED:
            history[1:] = [Message(USER, (self._write.text(self._rng.randint(*SUMMARY)),))]

    def _appended(self, before: int) -> tuple[int, ...]:
        return self._write.text(max(20, round(APPENDED.draw(self._rng)) - before))

    def _answer(self) -> tuple[int, ...]:
        return self._write.text(1 + int(self._rng.expovariate(1 / ANSWER_MEAN)))


@dataclass
class _Running:
    """An agent under way: the request that its next one waits for, and who waits for it."""

    agent: Agent
    after: int = -1
    parent: _Running | None = None
    children: int = 0


def published_agents(rng: random.Random, requests: int = 400) -> list[Asked]:
    """Return the first requests of sessions, in the order in which they come, by a simulated
    clock."""
    agents, order = Agents(rng), count()
    asked: list[Asked] = []
    coming: list[tuple[float, int, _Running]] = []

    def come(running: _Running, now: float) -> None:
        heappush(coming, (now + PAUSES.draw(rng), next(order), running))

    for _ in range(SESSIONS):
        come(_Running(agents.session()), 0.0)
    while len(asked) < requests:
        now, _, running = heappop(coming)
        following = next(running.agent, None)
        if isinstance(following, Step):
            asked.append(Asked(following.messages, following.answer, running.after))
            running.after = len(asked) - 1
            come(running, now + len(following.answer) / TOKENS_A_SECOND)
        elif following is not None:
            running.children = len(following)
            for child in following:
                come(_Running(child, running.after, running), now)
        elif running.parent is None:
            come(_Running(agents.session()), now)
        else:
            parent = running.parent
            parent.children -= 1
            parent.after = max(parent.after, running.after)
            if not parent.children:
                come(parent, now)
    return asked
