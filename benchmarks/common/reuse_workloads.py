"""Five workloads for policies of snapshots, as parts of prompts: no model, no text.

They were written down before the policy and are never tuned afterwards:
`tests/test_reuse.py` keeps their digests. A prompt has tokens and marks as a chat template
would leave them; answers are scripted, so that next turns contain them. All lengths are in tokens.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

END_OF_TURN, START, NEWLINE = 1, 5, 6
SYSTEM, USER, ASSISTANT, TOOL = 7, 8, 9, 10
VISION_START, PAD, VISION_END = 2, 3, 4
VOCABULARY = 50_000


@dataclass(frozen=True)
class Frames:
    """A video's temporal patches, from the first one on.

    Attributes:
        camera: its subject.
        count: number of patches.
        tokens: of each patch.
    """

    camera: int
    count: int
    tokens: int

    def content(self, patch: int) -> bytes:
        return hashlib.sha256(f"camera {self.camera} patch {patch}".encode()).digest()


Part = tuple[int, ...] | Frames


@dataclass(frozen=True)
class Message:
    role: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        messages: of a chat; a single one without a role is a plain prompt.
        answer: the tokens of its answer, without the last one.
        after: requests in flight that must have been answered before it is sent, by index.
    """

    messages: tuple[Message, ...]
    answer: tuple[int, ...]
    after: int = -1


@dataclass
class Writer:
    """Draws texts and lengths."""

    rng: random.Random

    def text(self, length: int) -> tuple[int, ...]:
        return tuple(self.rng.choices(range(16, VOCABULARY), k=length))

    def length(self, least: int, median: float, most: int) -> int:
        """Log-normal with a sigma of 0.8, clipped."""
        drawn = median * self.rng.lognormvariate(0.0, 0.8)
        return int(min(most, max(least, drawn)))

    def prose(self, least: int, median: float, most: int) -> tuple[int, ...]:
        return self.text(self.length(least, median, most))


Session = Iterator[tuple[tuple[Message, ...], tuple[int, ...]]]
"""The requests of one user in order, each with its answer. The next one waits for that."""


def interleaved(rng: random.Random, sessions: Sequence[Session], at_once: int) -> list[Asked]:
    """All requests of the sessions, of which so many are open at once; each open session is
    equally likely to ask next."""
    waiting, opened = list(reversed(sessions)), list[tuple[Session, int]]()
    asked: list[Asked] = []
    while waiting or opened:
        while waiting and len(opened) < at_once:
            opened.append((waiting.pop(), -1))
        place = rng.randrange(len(opened))
        session, after = opened[place]
        following = next(session, None)
        if following is None:
            del opened[place]
            continue
        asked.append(Asked(*following, after))
        opened[place] = session, len(asked) - 1
    return asked


def chats(rng: random.Random) -> list[Asked]:
    """Four applications with system prompts of their own, 110 conversations of one to eight turns,
    24 at once. Of the first messages 15 % quote a long text. 8 % of the answers are asked for
    again, and 8 % of the questions are changed from their middle on and asked again."""
    write = Writer(rng)
    systems = [write.text(length) for length in (200, 700, 1500, 2600)]

    def conversation() -> Session:
        history = [Message(SYSTEM, (rng.choices(systems, (4, 3, 2, 1))[0],))]
        for turn in range(8):
            question = write.prose(8, 60, 500)
            if turn == 0 and rng.random() < 0.15:
                question = write.prose(800, 1800, 5000) + question
            answer = write.prose(10, 60, 150)
            yield (*history, Message(USER, (question,))), answer
            if rng.random() < 0.08:
                answer = write.prose(10, 60, 150)
                yield (*history, Message(USER, (question,))), answer
            if rng.random() < 0.08:
                question = question[: len(question) // 2] + write.prose(8, 30, 200)
                answer = write.prose(10, 60, 150)
                yield (*history, Message(USER, (question,))), answer
            history += [Message(USER, (question,)), Message(ASSISTANT, (answer,))]
            if rng.random() < 0.25:
                return

    return interleaved(rng, [conversation() for _ in range(110)], 24)


def agents(rng: random.Random) -> list[Asked]:
    """Three agents with tools, 40 tasks of four to fourteen calls in eight repositories, ten at
    once. The first message is the repository's instructions and then the task. Beyond 12 000
    tokens of results a client clears the older half of them, once."""
    write = Writer(rng)
    systems = [write.text(length) for length in (2500, 4100, 6000)]
    repositories = [write.prose(500, 1200, 2500) for _ in range(8)]

    def task() -> Session:
        first = rng.choice(repositories) + write.prose(20, 120, 600)
        history = [Message(SYSTEM, (rng.choice(systems),)), Message(USER, (first,))]
        results, cleared = 0, False
        for _ in range(rng.randint(4, 14)):
            call = write.prose(15, 40, 120)
            yield tuple(history), call
            result = write.prose(20, 350, 4000)
            results += len(result)
            history += [Message(ASSISTANT, (call,)), Message(TOOL, (result,))]
            if results > 12_000 and not cleared:
                cleared = True
                tools = [i for i, message in enumerate(history) if message.role == TOOL]
                for index in tools[: len(tools) // 2]:
                    history[index] = Message(TOOL, ((20, 21, 22),))
        yield tuple(history), write.prose(30, 80, 200)

    return interleaved(rng, [task() for _ in range(40)], 10)


def documents(rng: random.Random) -> list[Asked]:
    """60 documents with one to eight questions each, 12 documents at once. A question follows its
    document in the same message, and starts no conversation."""
    write = Writer(rng)
    system = Message(SYSTEM, (write.text(150),))

    def readers() -> Session:
        document = write.prose(1200, 5000, 16_000)
        for _ in range(8):
            question = write.prose(6, 25, 150)
            yield (system, Message(USER, (document + question,))), write.prose(10, 50, 120)
            if rng.random() < 0.22:
                return

    return interleaved(rng, [readers() for _ in range(60)], 12)


def growing_video(rng: random.Random) -> list[Asked]:
    """12 cameras whose recordings grow by two to eight patches between questions, 24 questions
    each. A quarter of them is followed by a second one about the same recording, and a tenth is
    about its first part alone."""
    write = Writer(rng)
    system = Message(SYSTEM, (write.text(120),))

    def camera(number: int) -> Session:
        count, size = rng.randint(8, 30), rng.choice((66, 96, 140))
        for _ in range(24):
            seen = rng.randint(3, count) if rng.random() < 0.1 else count
            for _ in range(1 + (rng.random() < 0.25)):
                question = write.prose(6, 20, 80)
                parts = (Frames(number, seen, size), question)
                yield (system, Message(USER, parts)), write.prose(8, 25, 80)
            count += rng.randint(2, 8)

    return interleaved(rng, [camera(number) for number in range(12)], 12)


def few_shot(rng: random.Random) -> list[Asked]:
    """16 tasks, three at once, with instructions and five to twelve examples before ten questions.
    In half of the tasks each question is scored with four continuations; in the others it is
    answered twice. Prompts are plain text."""
    write = Writer(rng)

    def task(choices: bool) -> Session:
        examples = [write.prose(40, 150, 500) for _ in range(rng.randint(5, 12))]
        preamble = write.text(rng.randint(30, 120)) + tuple(t for one in examples for t in one)
        for _ in range(10):
            question = preamble + write.prose(25, 90, 400)
            for _ in range(4 if choices else 2):
                whole = question + (write.prose(1, 6, 20) if choices else ())
                answer = write.text(1) if choices else write.prose(10, 40, 100)
                yield (Message(0, (whole,)),), answer

    return interleaved(rng, [task(number % 2 == 0) for number in range(16)], 3)


Drawn = Callable[[random.Random], list[Asked]]
WORKLOADS: dict[str, Drawn] = {
    "chats": chats,
    "agents": agents,
    "documents with questions": documents,
    "growing video": growing_video,
    "few-shot evaluation": few_shot,
}
BUDGETS = (16, 32, 64, 128, 256)
"""Rows for snapshots."""
SEED = 52


@dataclass
class Rendered:
    """A prompt as its template leaves it.

    Attributes:
        token_ids: of the whole prompt.
        spans: (start, end, content hash, patch, item) of every media span.
        media, media_ends, message_ends, system_end, stable_end: see `Prompt`.
    """

    token_ids: list[int] = field(default_factory=list)
    spans: list[tuple[int, int, bytes, int, int]] = field(default_factory=list)
    media: list[Frames] = field(default_factory=list)
    media_ends: list[int] = field(default_factory=list)
    message_ends: list[int] = field(default_factory=list)
    system_end: int = 0
    stable_end: int = 0

    def add(self, part: Part) -> None:
        if isinstance(part, tuple):
            self.token_ids += part
            return
        for patch in range(part.count):
            seconds = (11, 12 + patch // 100, 12 + patch // 10 % 10, 12 + patch % 10)
            self.token_ids += (*seconds, VISION_START)
            start = len(self.token_ids)
            self.token_ids += [PAD] * part.tokens
            end = len(self.token_ids)
            self.spans.append((start, end, part.content(patch), patch, len(self.media)))
            self.token_ids.append(VISION_END)
        self.media.append(part)
        self.media_ends.append(self.spans[-1][1])


def render(messages: Sequence[Message]) -> Rendered:
    """Render a chat, or a plain prompt; a chat ends where the answer begins."""
    found = Rendered()
    for message in messages:
        if message.role:
            found.token_ids += (START, message.role, NEWLINE)
        for part in message.parts:
            found.add(part)
        if message.role:
            found.token_ids.append(END_OF_TURN)
            found.message_ends.append(len(found.token_ids))
            if message.role == SYSTEM and len(found.message_ends) == 1:
                found.system_end = len(found.token_ids)
            found.token_ids.append(NEWLINE)
    if messages[0].role:
        found.token_ids += (START, ASSISTANT, NEWLINE)
        found.stable_end = len(found.token_ids)
    return found


def workload(
    name: str, seed: int = SEED, workloads: Mapping[str, Drawn] = WORKLOADS
) -> list[Asked]:
    """Return the requests of a workload in their order."""
    return workloads[name](random.Random(f"{name} {seed}"))


def digest(asked: Sequence[Asked]) -> str:
    """Return a digest of a workload."""
    whole = hashlib.sha256()
    for one in asked:
        found = render(one.messages)
        marks = (found.media_ends, found.message_ends, found.system_end, found.stable_end)
        whole.update(repr((found.token_ids, found.spans, marks, one.answer, one.after)).encode())
    return whole.hexdigest()
