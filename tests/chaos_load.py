"""Ordinary clients with questions and their answers from a calm time."""

from __future__ import annotations

import base64
import copy
import io
import itertools
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
from PIL import Image
from PIL.PngImagePlugin import PngInfo

HANG_SECONDS = 240.0
"""Nothing may take so long, under any load."""
PREFIX = "A long beginning that all of these share, so that the cache has something to give. " * 6
SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 8}, "good": {"type": "boolean"}},
    "required": ["word", "good"],
    "additionalProperties": False,
}

RIGHT, IN_TIME, AGAIN = "right", "in time", "again"
"""Promises that questions show kept or broken; see `chaos.PROMISES`."""

_numbers = itertools.count()


class Broken(NamedTuple):
    """A promise, and what broke it."""

    promise: str
    what: str


@dataclass(frozen=True)
class Question:
    """A question.

    Attributes:
        continued: body of a second one about the stored answer of the first; None: there is none.
    """

    name: str
    path: str
    body: dict[str, Any]
    continued: dict[str, Any] | None = None


def questions(adapter: str | None, *, responses: bool = False) -> list[Question]:
    """Greedy ones for every part within reach of chaos; with `responses` also stored ones."""

    def chat(name: str, content: Any, **fields: Any) -> Question:
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0}
        return Question(name, "/v1/chat/completions", body | {"max_tokens": 24} | fields)

    found = [chat(f"text {n}", f"{PREFIX}{n} circles?") for n in range(6)]
    found += [
        chat(f"long {n}", f"{PREFIX}{n} stars?", max_tokens=96, ignore_eos=True) for n in (1, 2)
    ]
    for number in range(3):
        regex = {"regex": f"(yes|no|{'a' * (number + 1)})"}
        found.append(chat(f"regex {number}", f"{number}?", structured_outputs=regex))
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA}}
    found.append(chat("schema", "Fill it in.", response_format=form))
    image = {"type": "image_url", "image_url": {"url": circle()}}
    found.append(chat("picture", [image, {"type": "text", "text": "What is this?"}]))
    found.append(chat("two", f"{PREFIX}both", n=2, seed=3, temperature=0))
    prompt = {"prompt": f"{PREFIX}One, two,", "max_tokens": 24, "temperature": 0}
    found.append(Question("completion", "/v1/completions", prompt))
    if adapter is not None:
        found.append(chat("adapter", f"{PREFIX}And you?", model=adapter))
    if responses:
        for number in range(3):
            found.append(conversation(number))
    return found


def conversation(number: int) -> Question:
    """Two turns, of which the second one needs the stored first one."""
    fields = {"temperature": 0, "max_output_tokens": 16, "store": True}
    bodies = [{"input": f"{PREFIX}{number} {word}?", **fields} for word in ("moons", "suns")]
    return Question(f"turns {number}", "/v1/responses", *bodies)


def fresh(question: Question, number: int) -> dict[str, Any]:
    """The same question in other bytes: its grammar is compiled and its picture decoded again."""
    body = copy.deepcopy(question.body)
    if "structured_outputs" in body:
        body["structured_outputs"]["regex"] += f"(k{number}){{0}}"
    if "response_format" in body:
        body["response_format"]["json_schema"]["schema"]["description"] = str(number)
    if question.name == "picture":
        body["messages"][0]["content"][0]["image_url"]["url"] = circle(str(number))
    return body


def circle(comment: str = "") -> str:
    """A data URL of always the same picture."""
    file, written = io.BytesIO(), PngInfo()
    written.add_text("comment", comment)
    Image.new("RGB", (64, 48), "red").save(file, "PNG", pnginfo=written)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def streamed(text: str) -> Any:
    """The sum of a stream's chunks; an error if it ends early or says one."""
    said: dict[int, list[Any]] = {}
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        return "cut off"
    for line in lines[:-1]:
        chunk = json.loads(line)
        if "error" in chunk:
            return "an error"
        for choice in chunk.get("choices", ()):
            part = said.setdefault(choice["index"], ["", None])
            part[0] += choice.get("text", choice.get("delta", {}).get("content")) or ""
            part[1] = choice["finish_reason"] or part[1]
    return [tuple(said[index]) for index in sorted(said)]


def whole(body: dict[str, Any]) -> Any:
    """The same of an answer in one piece."""
    if "output" in body:
        parts = [part for item in body["output"] for part in item.get("content") or ()]
        return [("".join(part.get("text", "") for part in parts), body["status"])]
    made = sorted(body["choices"], key=lambda each: int(each["index"]))
    texts = [each["text"] if "text" in each else each["message"]["content"] for each in made]
    return [(text or "", each["finish_reason"]) for text, each in zip(texts, made, strict=True)]


@dataclass
class Judge:
    """Compares answers with those of the calm time.

    Attributes:
        right, errors: how many there were, errors by what they were.
        broken: answers that differ, refusals, and whatever took too long.
    """

    known: dict[str, Any] = field(default_factory=dict)
    right: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    broken: list[Broken] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, client: httpx.Client, question: Question, *, stream: bool) -> bool:
        """Ask, and judge the answer; return True if it was right, or is the first one.

        A refusal (4xx) is a wrong answer: the questions are right. Only a stored answer may be gone
        when its conversation goes on.
        """
        stream = stream and question.continued is None
        body = fresh(question, next(_numbers)) | ({"stream": True} if stream else {})
        begun = time.monotonic()
        reply = self._reply(client, question, body)
        if reply is None:
            return False
        said = streamed(reply.text) if stream else whole(reply.json())
        if question.continued is not None:
            earlier = {"previous_response_id": reply.json()["id"]}
            reply = self._reply(client, question, question.continued | earlier)
            if reply is None:
                return False
            said += whole(reply.json())
        if isinstance(said, str):
            return self._failed(question, said)
        if time.monotonic() - begun > HANG_SECONDS:
            return self._failed(question, "an answer", f"after {HANG_SECONDS:.0f} s")
        with self.lock:
            if said != self.known.setdefault(question.name, said):
                what = f"{question.name}: {said} and not {self.known[question.name]}"
                self.broken.append(Broken(RIGHT, what))
                return False
            self.right += 1
        return True

    def _reply(
        self, client: httpx.Client, question: Question, body: dict[str, Any]
    ) -> httpx.Response | None:
        """Return the reply to one request; None: it was an error, which is counted."""
        try:
            reply = client.post(question.path, json=body)
        except httpx.TransportError as error:
            hung = isinstance(error, httpx.TimeoutException)
            fault = f"after {HANG_SECONDS:.0f} s" if hung else ""
            self._failed(question, type(error).__name__, fault)
            return None
        if reply.status_code == 200:
            return reply
        gone = reply.status_code == 404 and "previous_response_id" in body
        fault = "" if gone or reply.status_code >= 500 else reply.text[:200]
        self._failed(question, str(reply.status_code), fault)
        return None

    def _failed(self, question: Question, what: str, fault: str = "") -> bool:
        """Count an error; one with a fault breaks a promise."""
        with self.lock:
            self.errors[what] += 1
            if fault:
                late = fault.startswith("after ")
                broken = Broken(IN_TIME if late else RIGHT, f"{question.name}: {what} {fault}")
                self.broken.append(broken)
        return False


class Clients:
    """A few clients with one question after the other, until stopped."""

    def __init__(
        self, url: str, asked: list[Question], judge: Judge, seed: int, count: int
    ) -> None:
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(url, asked, judge, f"{seed} {each}"))
            for each in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, url: str, asked: list[Question], judge: Judge, seed: str) -> None:
        chance = random.Random(seed)
        with httpx.Client(base_url=url, timeout=HANG_SECONDS, trust_env=False) as client:
            while not self._stopped.is_set():
                if chance.random() < 0.1:
                    self._leave(client, chance.choice(asked))
                elif not judge.ask(client, chance.choice(asked), stream=chance.random() < 0.5):
                    self._stopped.wait(0.2)

    def _leave(self, client: httpx.Client, question: Question) -> None:
        """Begin to read a stream, and go."""
        try:
            body = question.body | {"stream": True}
            with client.stream("POST", question.path, json=body) as reply:
                next(reply.iter_raw(), None)
        except httpx.TransportError:
            pass

    def stop(self) -> list[Broken]:
        """Return clients without an end."""
        self._stopped.set()
        deadline = time.monotonic() + 2 * HANG_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [thread for thread in self._threads if thread.is_alive()]
        return [Broken(IN_TIME, "a client never came back") for _ in stuck]
