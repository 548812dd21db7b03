"""An engine that answers from a script, for what a real one does too rarely or too quickly: stalls,
failures in the middle of an answer, tool calls, its own death."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, fields
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch

from vlm_serve.cache.events import CacheEvents
from vlm_serve.engine.core.loop import StepTimes
from vlm_serve.engine.features.adapters.store import AdapterStore
from vlm_serve.engine.features.inspection import PinInfo
from vlm_serve.engine.features.mirror import TreeMirror
from vlm_serve.engine.numerics.arithmetic import Backend, decide
from vlm_serve.engine.requests.outputs import CacheReport, Delta, Usage
from vlm_serve.engine.requests.tenant import NOBODY, Tenant
from vlm_serve.engine.requests.thought import Thought
from vlm_serve.engine.steps.memory import MemoryPlan
from vlm_serve.errors import EngineClosedError, VlmServeError
from vlm_serve.models.adapters import Modules
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.identity.keys import WeightsIdentity
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.reading.conversation import Conversation
from vlm_serve.preprocess.text.template import TemplateTraits
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.structured_outputs import StructuredOutputs


class FakePreprocessor:
    """Renders messages as `role: text` lines; the last line is the generation prompt."""

    weights = WeightsIdentity(b"w" * 32, b"v" * 32)

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.gate = threading.Event()
        self.reset()

    def reset(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.generation_prompt = "assistant:"
        self.template_traits = TemplateTraits(frozenset({"messages", "enable_thinking"}))
        self.gate.set()

    def encode(self, text: str, *, cache_salt: str = "") -> list[int]:
        return self.tokenizer.encode(text)

    def begin(self, conversation: Conversation, **options: Any) -> Any:
        """A draft whose media, if there were any, count as loaded."""
        messages, media = conversation.messages, [part.joined() for part in conversation.media]
        given = {each.name: getattr(conversation, each.name) for each in fields(conversation)}
        given |= {"media": media, "tools": conversation.tools or None}
        given["chat_template_kwargs"] = conversation.template_kwargs or None
        self.calls.append({**given, **options})
        assert self.gate.wait(30)
        if self.error is not None:
            raise self.error
        lines = [f"{message['role']}: {message.get('content')}" for message in messages]
        prompt = self._prompt("\n".join([*lines, self.generation_prompt]))
        return SimpleNamespace(media=(), prompt=prompt)

    def count_fetched(self, holding: Any) -> None:
        """There is nothing to fetch."""

    def prepare(self, conversation: Conversation, **options: Any) -> Prompt:
        return self.finish(self.begin(conversation, **options), ())

    def finish(self, draft: Any, media: Sequence[Any]) -> Prompt:
        prompt: Prompt = draft.prompt
        return prompt

    takes_media = True

    def prepare_tokens(self, token_ids: Sequence[int], **options: Any) -> Prompt:
        return self._prompt(self.tokenizer.decode(token_ids))

    def _prompt(self, text: str) -> Prompt:
        ids = tuple(self.tokenizer.encode(text))
        keys: Any = SimpleNamespace(root=bytes(32), owners=SimpleNamespace(prompt=bytes(32)))
        return Prompt(ids, torch.zeros(3, len(ids), dtype=torch.int64), 0, keys, text=text)


class FakeGrammars:
    """Lets every answer be: the script decides."""

    def find(self, form: StructuredOutputs, after: bytes, owner: bytes) -> None:
        return None

    compile = find


@dataclass
class FakeRequest:
    prompt: Prompt
    params: SamplingParams
    on_delta: Callable[[Delta], None]
    on_step: Callable[[], None] | None = None
    aborted: threading.Event = field(default_factory=threading.Event)


class FakePins:
    """Pins of an engine without any."""

    def listed(self, owner: bytes | None = None) -> tuple[PinInfo, ...]:
        return ()

    def lift(self, owner: bytes | None = None, key: bytes | None = None) -> int:
        return 0


def _wait_for_loop(on_step: Any) -> None:
    """Wait until the server's event loop has dealt with what it was woken for."""

    async def turns() -> None:
        for _ in range(8):
            await asyncio.sleep(0)

    mailbox: Any = getattr(on_step, "__self__", None)
    turning = turns()
    try:
        asyncio.run_coroutine_threadsafe(turning, mailbox._loop).result(5)
    except (AttributeError, RuntimeError, TimeoutError, CancelledError):
        turning.close()  # the loop has ended


class FakeEngine:
    """Answers every request with `answer`, a token at a time.

    Attributes:
        answer: the text of every answer.
        gate: while it is clear, no token is emitted.
        check_gate: while it is clear, a check of the cache goes on.
        pause_after: after so many deltas of a request, `gate` is cleared.
        fail_after: after so many tokens of a choice, requests end with `failure`.
        paced: every token has been told before the next one comes, so none share an event.
    """

    pid = None

    def __init__(self, tokenizer: Tokenizer, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig(block_size=16)
        self.arithmetic = decide(self.config, torch.float32, Backend(torch.device("cpu")))
        self.preprocessor = FakePreprocessor(tokenizer)
        self.grammars = FakeGrammars()
        self.adapters = AdapterStore(Modules(), max_rank=64)
        self.memory = MemoryPlan(1 << 20, 16, 1 << 10, 1 << 12, 8, 4, 2)
        self.max_model_len = 4096
        self.spec = SimpleNamespace(generation={})
        self.weight_version = "default"
        self.gate, self.check_gate = threading.Event(), threading.Event()
        self.num_checks = self.num_flushes = 0
        self.holds: list[bool] = []
        self.mirror = TreeMirror(CacheEvents())
        self.step_times = StepTimes()
        self.alive = True
        self.degraded: str | None = None
        self.rests: frozenset[str] = frozenset()
        self.last_step_time = time.monotonic()
        self.requests: dict[str, FakeRequest] = {}
        self.num_submitted = 0
        self.num_waiting = 0
        self._inbox: SimpleQueue[FakeRequest | None] = SimpleQueue()
        self._names = itertools.count()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()
        self.reset()
        self.pins = FakePins()

    def before_grammar(self, prompt: Prompt, thought: Thought | None, *, splits: bool) -> bytes:
        return b""

    def reset(self) -> None:
        """Back to plain answers, for the next test."""
        self.answer = "Hello, world!"
        self.fail_after: int | None = None
        self.pause_after: int | None = None
        self.paced = True
        self.failure: Exception = VlmServeError("the step failed")
        self.check_error: AssertionError | None = None
        self.submit_error: Exception | None = None
        self.gate.set()
        self.check_gate.set()
        self.preprocessor.reset()

    @property
    def num_running(self) -> int:
        return len(self.requests)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_delta: Callable[[Delta], None],
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: Tenant = NOBODY,
        affinity: Sequence[bytes] = (),
        thought: Thought | None = None,
        on_step: Callable[[], None] | None = None,
        **_: object,
    ) -> str:
        if not self.alive:
            raise EngineClosedError("the engine is closed")
        if self.submit_error is not None:
            raise self.submit_error
        name = request_id or str(next(self._names))
        self.num_submitted += 1
        request = FakeRequest(prompt, params, on_delta, on_step)
        self.latest_params, self.latest_tenant = params, tenant
        self.latest_thought = thought
        self.latest_affinity = tuple(affinity)
        self.requests[name] = request
        self._inbox.put(request)
        return name

    def abort(self, request_id: str) -> None:
        request = self.requests.pop(request_id, None)
        if request is not None:
            request.aborted.set()

    def hold(self, request_id: str, held: bool) -> None:
        self.holds.append(held)

    def flush(self) -> None:
        self.num_flushes += 1

    def check(self, wanted: Callable[[], bool] = lambda: False) -> bool:
        self.num_checks += 1
        while not self.check_gate.wait(0.01):
            if wanted():
                return False
        if self.check_error is not None:
            raise self.check_error
        return True

    def stats(self) -> dict[str, Any]:
        return {
            "num_joined": 3,
            "num_running": 1,
            "num_unread": 1,
            "tenants": {
                "tenant 1": {
                    "requests": 2,
                    "prompt_tokens": 9,
                    "cached_tokens": 4,
                    "generated_tokens": 8,
                    "given_up_seats": 1,
                }
            },
            "num_waiting": 0,
            "embedding_bytes": 0,
            "known_text": {"part_hits": 3, "prompt_misses": 1},
            "num_preemptions": 2,
            "num_unsound": 0,
            "num_steps": 5,
            "steps_ahead": {"extended": 4, "ahead": 3, "refusals": {"prompt": 1}},
            "adapters": {
                "tuned": {
                    "requests": 2,
                    "prompt_tokens": 50,
                    "cached_tokens": 20,
                    "generated_tokens": 9,
                    "draft_tokens": 6,
                    "accepted_tokens": 4,
                }
            },
            "replays": {"requests": 2, "tokens": 30, "disagreements": 0},
            "step_times": self.step_times.as_dict(),
            "drafts": {
                "drafts": 4,
                "draft_tokens": 12,
                "accepted_tokens": 6,
                "accepted_per_position": [4, 2],
            },
            "audit": {"audits": 9, "mismatches": 1, "near_ties": 2, "dropped": 3},
            "cache": {
                "saves": {"media": 3},
                "skips": {},
                "evictions": {"kv": 1},
                "requests": 9,
                "query_tokens": 900,
                "hit_tokens": 500,
                "reasons": {},
                "joined_requests": 4,
                "joined_tokens": 640,
                "joined_ms": 250.0,
            },
            "usage": {
                "blocks": 10,
                "free_blocks": 4,
                "cached_blocks": 1,
                "rows": {"free": 7, "ready": 0, "reserved": 0, "private": 0, "live": 0},
                "expert_bytes": 0,
                "logprob_bytes": 0,
            },
            "held_bytes": {"kv": 6, "grammars": 0},
            "tiers": {},
            "embeddings": {"encoded": 3, "disk": 2},
            "uploads": {"decoded": 4, "tiers": 1},
            "video_frames": {"shown": 8, "known": 2, "decoded": 60},
        }

    def close(self) -> None:
        if self.alive:
            self.alive = False
            self.gate.set()
            self._inbox.put(None)
            self._thread.join(10)

    def _loop(self) -> None:
        while (request := self._inbox.get()) is not None:
            for number, delta in enumerate(self._answer(request)):
                if number == self.pause_after:
                    self.gate.clear()
                assert self.gate.wait(30)
                if request.aborted.is_set():
                    break
                if delta.finish_reason == "error" or (
                    delta.finish_reason is not None and delta.index == request.params.n - 1
                ):
                    self._forget(request)
                self.last_step_time = time.monotonic()
                request.on_delta(delta)
                if request.on_step is not None:
                    request.on_step()
                if self.paced:
                    _wait_for_loop(request.on_step)

    def _forget(self, request: FakeRequest) -> None:
        for name, other in list(self.requests.items()):
            if other is request:
                del self.requests[name]

    def _answer(self, request: FakeRequest) -> Iterator[Delta]:
        tokens = self.preprocessor.tokenizer.encode_plain(self.answer)
        reason: Any = "stop"
        limit = request.params.max_tokens
        if limit is not None and limit < len(tokens):
            tokens, reason = tokens[:limit], "length"
        prompt_tokens = len(request.prompt)
        report = CacheReport(
            prompt_tokens, 0, 0, 0, tiers={"device": 2, "host": 1}, media_skipped=1, reason="cold"
        )
        for index in range(request.params.n):
            for number, token in enumerate(tokens, start=1):
                if self.fail_after is not None and number > self.fail_after:
                    error: Any = self.failure
                    yield Delta(index, finish_reason="error", error=error)
                    return
                last = number == len(tokens)
                yield Delta(
                    index,
                    text=self.preprocessor.tokenizer.token_bytes(token).decode("utf-8", "replace"),
                    token_ids=(token,),
                    logprobs=self._logprobs(token, request.params.logprobs),
                    finish_reason=reason if last else None,
                    usage=Usage(prompt_tokens, index * len(tokens) + number, 3, 4, 1, 2),
                    cache_report=report,
                )

    @staticmethod
    def _logprobs(token: int, count: int | None) -> tuple[dict[int, float], ...]:
        if count is None:
            return ()
        rivals = {300 + rank: -1.0 - rank for rank in range(count)}
        return ({**rivals, token: -0.5},)
