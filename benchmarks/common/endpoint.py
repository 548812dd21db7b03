"""One or two OpenAI-compatible endpoints, timed by their client in turns."""

from __future__ import annotations

import base64
import io
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx
from PIL import Image, ImageDraw

TIMEOUT_SECONDS = 600.0
"""Longest silence of an endpoint."""
OPTIONAL = ("ignore_eos", "stream_options", "temperature")
"""Fields that a request goes without where an endpoint refuses them by name."""
TEXTS = ("content", "reasoning_content", "reasoning")
"""Fields of a chunk's `delta` that hold generated text."""
ROWS = ("prefill", "same prompt again", "decode", "picture", "same picture again")
QUESTIONS = ("What is in this picture?", "Which color is the largest shape?")
_TEXT = (
    "after again air animal answer apple around autumn basket before bell between bird blue board "
    "boat book bread bridge bright bring brother build butter carry chair child clear climb cloud "
    "coat cold corner country cover dark deep door drink early earth east evening field find fire "
    "first fish floor flower follow forest garden glass gold grass green ground hand harbour "
    "heavy hill horse house island kitchen lamp large late leaf letter light listen little long "
    "market"
)
WORDS = tuple(_TEXT.split())
PICTURE_PIXELS = 448
TRIAL_WORDS = 200
SPARE_TOKENS = 128
"""Left free of the context beside prompt and answer, for the chat template."""


class EndpointError(Exception):
    """An endpoint is out of reach, refuses a request, or answers in another form.

    Attributes:
        status: of the answer; 200 if its form is another one or it broke off, None without any.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured request.

    Attributes:
        seconds: from before it was sent until its answer's end.
        tokens: of the prompt, in the row "decode" of the answer; None if they are not reported.
        cached: tokens of the prompt that the endpoint reports as reused; None if it does not.
        cost: compared between endpoints: seconds, or seconds per token of a long answer; None if
            there is nothing to compare.
    """

    seconds: float
    tokens: int | None
    cached: int | None
    cost: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is asked.

    Attributes:
        prompt_tokens: about as many in a text prompt, as the first endpoint counts.
        answer_tokens: of the answers that show the pace of decoding.
        rounds: at most; the first one is always completed.
        seconds: no round begins after this time.
        seed: of words and pictures.
    """

    prompt_tokens: int
    answer_tokens: int
    rounds: int
    seconds: float
    seed: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """A peer's cost over the first endpoint's, round by round."""

    median: float
    low: float
    high: float


@dataclass
class Side:
    """A client of one endpoint, and its samples by row, one a round.

    Attributes:
        url: with or without `/v1` at its end.
        model: the name to ask for; empty: the first that the endpoint lists.
        samples: None stands for a request that was refused.
        refused: the message of each row that was.
        without: fields of `OPTIONAL` that the endpoint has refused.
    """

    url: str
    model: str = ""
    key: str | None = None
    samples: dict[str, list[Sample | None]] = field(
        default_factory=lambda: {name: [] for name in ROWS}
    )
    refused: dict[str, str] = field(default_factory=dict)
    without: list[str] = field(default_factory=list)
    _length: str = "max_tokens"

    def __post_init__(self) -> None:
        self.url = self.url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        self.client = httpx.Client(
            base_url=f"{self.url}/v1", headers=headers, timeout=TIMEOUT_SECONDS
        )

    def look(self) -> int | None:
        """Choose the model if none was named; return its context in tokens, if it is listed."""
        try:
            answer = self.client.get("/models")
            if answer.status_code != 200:
                raise _refusal(self.url, answer)
            names = {str(each["id"]): each for each in answer.json()["data"]}
            self.model = self.model or next(iter(names))
        except httpx.HTTPError as error:
            raise EndpointError(f"{self.url}: {error or type(error).__name__}") from None
        except (EndpointError, ValueError, KeyError, TypeError, StopIteration) as error:
            if self.model:
                return None
            if isinstance(error, EndpointError):
                raise
            raise EndpointError(f"{self.url} lists no models: name one") from None
        length = names.get(self.model, {}).get("max_model_len")
        return length if isinstance(length, int) else None

    def ask(self, content: Any, length: int, *, to_the_end: bool = False) -> Sample | None:
        """Have a user's message answered greedily, as a stream; return None without any text.

        Args:
            content: text, or parts of a message.
            length: most tokens of the answer.
            to_the_end: ask for exactly that many, by `ignore_eos`; the sample is of decoding.
        """
        while True:
            body = {
                "model": self.model,
                "messages": [{"role": "user", "content": content}],
                "stream": True,
                self._length: length,
                "temperature": 0,
                "stream_options": {"include_usage": True},
            } | ({"ignore_eos": True} if to_the_end else {})
            for name in self.without:
                body.pop(name, None)
            begin, usage, spoke = time.perf_counter(), dict[str, Any](), False
            try:
                for chunk in self._chunks(body):
                    usage = chunk.get("usage") or usage
                    deltas = [each.get("delta") or {} for each in chunk.get("choices") or ()]
                    spoke = spoke or any(each.get(name) for each in deltas for name in TEXTS)
            except EndpointError as error:
                if not self._adapt(error, body):
                    raise
                continue
            seconds = time.perf_counter() - begin
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            if not to_the_end:
                return Sample(seconds, usage.get("prompt_tokens"), cached, seconds)
            tokens = usage.get("completion_tokens")
            # All of it counts: how many tokens the first chunk holds is not reported.
            cost = seconds / tokens if tokens else None
            return Sample(seconds, tokens, cached, cost) if spoke else None

    def try_to_ask(self, row: str, content: Any, length: int, **how: Any) -> None:
        """Ask and keep the sample, unless that was refused before; keep a refusal's message."""
        sample = None
        if row not in self.refused:
            try:
                sample = self.ask(content, length, **how)
            except EndpointError as error:
                if error.status in (None, 200):
                    raise
                rows = ROWS[3:] if row == "picture" else (row,)
                self.refused |= dict.fromkeys(rows, str(error))
        self.samples[row].append(sample)

    def typical(self, row: str) -> Sample | None:
        """Return the sample of median time; None without any."""
        found = sorted((each for each in self.samples[row] if each), key=lambda each: each.seconds)
        return found[len(found) // 2] if found else None

    def _chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        try:
            with self.client.stream("POST", "/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise _refusal(self.url, answer)
                for line in answer.iter_lines():
                    if line.startswith("data:") and line != "data: [DONE]":
                        chunk = json.loads(line[len("data:") :])
                        if chunk.get("error"):
                            raise EndpointError(f"{self.url}: {chunk['error']}", 200)
                        yield chunk
        except (httpx.HTTPError, ValueError, AttributeError) as error:
            raise EndpointError(f"{self.url}: {error or type(error).__name__}") from None

    def _adapt(self, error: EndpointError, body: dict[str, Any]) -> bool:
        """Leave out the field that a refusal names; False if there is nothing to change."""
        if error.status not in (400, 422):
            return False
        if "max_completion_tokens" in str(error) and self._length == "max_tokens":
            self._length = "max_completion_tokens"
            return True
        named = [name for name in OPTIONAL if name in body and name in str(error)]
        self.without = [name for name in OPTIONAL if name in (*self.without, *named)]
        return bool(named)


def measure(sides: Sequence[Side], plan: Plan) -> int:
    """Ask every side in every round, in changing order; return the number of words in a prompt.

    Raises:
        EndpointError: an endpoint does not answer a text at all.
    """
    chosen = random.Random(plan.seed)
    deadline = time.monotonic() + plan.seconds
    lengths = [length for each in sides if (length := each.look()) is not None]
    words = _warm_up(sides, plan, chosen, min(lengths, default=None))
    for number in range(plan.rounds):
        if number and time.monotonic() > deadline:
            break
        body = chosen.getrandbits(32)
        for side in sides if number % 2 == 0 else reversed(sides):
            _round(side, plan, words, body, chosen.getrandbits(32))
    return words


def ratio(first: Side, peer: Side, row: str) -> Ratio | None:
    """Compare a row of two sides that were asked in the same rounds; None without any pair."""
    found = [
        theirs.cost / ours.cost
        for ours, theirs in zip(first.samples[row], peer.samples[row], strict=True)
        if ours and theirs and ours.cost and theirs.cost
    ]
    return Ratio(median(found), min(found), max(found)) if found else None


def text(words: int, body_seed: int, own_seed: int) -> str:
    """Return a prompt of random words.

    Args:
        words: how many.
        body_seed: decides all but the beginning.
        own_seed: decides the beginning, so that no prefix is shared with any other prompt.
    """
    own, body = random.Random(own_seed), random.Random(body_seed)
    begin = own.choices(WORDS, k=min(words, 16))
    return " ".join(begin + body.choices(WORDS, k=words - len(begin)))


def picture(seed: int) -> str:
    """Return the data: URL of a PNG of random shapes."""
    chosen, size = random.Random(seed), PICTURE_PIXELS
    image = Image.new("RGB", (size, size), _colour(chosen))
    pen = ImageDraw.Draw(image)
    for _ in range(24):
        left, top = chosen.randrange(size - 40), chosen.randrange(size - 40)
        box = (left, top, left + chosen.randint(30, 160), top + chosen.randint(30, 160))
        chosen.choice((pen.ellipse, pen.rectangle))(box, fill=_colour(chosen))
    data = io.BytesIO()
    image.save(data, "png")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def _colour(chosen: random.Random) -> tuple[int, int, int]:
    return chosen.randrange(256), chosen.randrange(256), chosen.randrange(256)


def _about(url: str, question: str) -> list[dict[str, Any]]:
    """Return the parts of a message with a picture before its question."""
    return [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": question},
    ]


def _warm_up(sides: Sequence[Side], plan: Plan, chosen: random.Random, context: int | None) -> int:
    """Ask each side an untimed text and picture; return the words of a prompt of wanted length."""
    per_word = None
    for side in sides:
        trial = text(TRIAL_WORDS, chosen.getrandbits(32), chosen.getrandbits(32))
        answer = side.ask(trial, 4)
        if per_word is None and answer is not None and answer.tokens:
            per_word = answer.tokens / TRIAL_WORDS
        side.ask("Count.", 4, to_the_end=True)
        side.try_to_ask("picture", _about(picture(chosen.getrandbits(32)), "?"), 1)
        side.samples["picture"].clear()
    wanted = plan.prompt_tokens
    if context is not None:
        wanted = min(wanted, context - plan.answer_tokens - SPARE_TOKENS)
    return max(1, round(wanted / (per_word or 1.3)))


def _round(side: Side, plan: Plan, words: int, body: int, own: int) -> None:
    prompt, url = text(words, body, own), picture(own)
    side.try_to_ask("prefill", prompt, 1)
    side.try_to_ask("same prompt again", prompt, 1)
    side.try_to_ask("picture", _about(url, QUESTIONS[0]), 1)
    side.try_to_ask("same picture again", _about(url, QUESTIONS[1]), 1)
    short = f"{text(8, body, own + 1)}. Count from one to a thousand."
    side.try_to_ask("decode", short, plan.answer_tokens, to_the_end=True)


def _refusal(url: str, answer: httpx.Response) -> EndpointError:
    said = answer.text[:4096]
    with suppress(ValueError, KeyError, TypeError):
        said = str(answer.json()["error"]["message"])
    said = " ".join(said.split())[:300]
    return EndpointError(f"{url}: HTTP {answer.status_code}: {said}", answer.status_code)
