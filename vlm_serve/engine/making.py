"""Makes requests of what callers ask for: defaults, checks, and what follows from the prompt."""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vlm_serve.engine.features.endings.next_turns import PlainTurn
from vlm_serve.engine.features.pause import Rest
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.engine.requests.pooling import check_task
from vlm_serve.engine.requests.request import NextTurn, Request, find_bad_words
from vlm_serve.engine.requests.tenant import NOBODY, Tenant
from vlm_serve.engine.requests.thought import CLOSING, Thought
from vlm_serve.engine.requests.validation import (
    check_forced,
    check_logprobs,
    check_request,
    with_token_limit,
)
from vlm_serve.errors import InvalidRequestError, OverloadedError
from vlm_serve.grammar.state import Grammar
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.identity.affinity import AffinityKey
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.prepare import Preprocessor
from vlm_serve.preprocess.text.family import THINK_END, begins_in_thought, leaves_thought_open
from vlm_serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vlm_serve.grammar.compiler import GrammarCompiler
    from vlm_serve.models import ModelSpec


def _plain_turn(prompt: Prompt) -> PlainTurn | None:
    return None if prompt.next_turn is None else PlainTurn(prompt.next_turn)


class RequestMaker:
    """Knowledge of an answer before it begins; no thread of an engine is involved.

    Attributes:
        config, spec: the engine's options, its model.
        preprocessor: makes the prompts.
        max_model_len: most tokens of a prompt with its answer.
        grammars: compiles grammars.
        pid: of the engine's process; None: it is this one.
        weight_version: the name that the last update of the weights gave.
    """

    pid: int | None = None
    weight_version: str = "default"

    @property
    def rests(self) -> frozenset[Rest]:
        """Return why the engine rests; "idle" ends with the next request."""
        raise NotImplementedError

    config: EngineConfig
    spec: ModelSpec
    preprocessor: Preprocessor
    max_model_len: int
    grammars: GrammarCompiler

    def __init__(self) -> None:
        self._updating = threading.Lock()

    @contextmanager
    def _only_update(self) -> Iterator[None]:
        """Let no other update of the weights begin before prompts are keyed by this one's.

        Raises InvalidRequestError if one is under way.
        """
        if not self._updating.acquire(blocking=False):
            raise InvalidRequestError("another update of the weights is under way")
        try:
            yield
        finally:
            self._updating.release()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_delta: Callable[[Delta], None],
        *,
        request_id: str | None = None,
        priority: int = 0,
        tenant: Tenant = NOBODY,
        grammar: Grammar | None = None,
        affinity: Sequence[AffinityKey] = (),
        forced: Sequence[Sequence[int]] = (),
        complete_experts: bool = False,
        thought: Thought | None = None,
        pooled: bool = False,
        next_turn: NextTurn | None = None,
        progress: bool = False,
        on_step: Callable[[], None] | None = None,
    ) -> str:
        """Queue a request and return its id.

        Args:
            prompt: prepared prompt.
            params: sampling options.
            on_delta: receives the increments; the last one of every choice has a finish reason.
            request_id: id to use; by default a random one.
            priority: lower values run first among the requests of a tenant.
            tenant: who it counts for where requests compete for the model.
            grammar: compiled grammar of `params.structured_outputs`; None compiles it in this call.
                Where the chat template marks thoughts and the prompt leaves one open, it begins
                behind that thought.
            affinity: the request's keys for `affinity_digest`.
            forced: tokens that each choice begins with, because another engine has already
                generated them. They are returned again and computed as usual.
            complete_experts: like the option `expert_replay`, for this request alone.
            pooled: a vector is wanted, not an answer.
            thought: how the answer may think. None: a budget of tokens for its thought applies if
                the prompt or the answer opens one, and stop strings apply inside of it.
            next_turn: what the next turn shares with this one. None: the caller of a conversation
                sends the answer's text back, other callers its tokens.
            progress: tell the progress of the prompt, see `Delta.progress`.
            on_step: see `Request.on_step`; like `on_delta` it must neither block nor raise.

        Raises:
            ContextLengthError: prompt and answer do not fit the context.
            InvalidRequestError: an empty prompt or a parameter outside the vocabulary.
            ModelNotFoundError: the prompt's adapter has been unloaded.
            EngineClosedError: the engine no longer runs.
            OverloadedError: it is asleep.
        """
        if "asleep" in self.rests:
            raise OverloadedError("the engine is asleep: wake it up first", code="asleep")
        check_task(self.config, pooled=pooled)
        params = params.with_defaults(self.spec.generation)
        prompt = prompt.last_tokens(params.kept_prompt_tokens(self.max_model_len))
        params = with_token_limit(params, self.spec.generation, self.max_model_len - len(prompt))
        check_logprobs(params, self.config.max_logprobs)
        check_request(prompt, params, self.spec, self.max_model_len)
        check_forced(forced, params.n, self.spec.vocab_size)
        if grammar is None and params.structured_outputs is not None:
            marked = self.preprocessor.template_traits.thinking.marked
            after = self.before_grammar(prompt, None, splits=marked)
            grammar = self.grammars.compile(
                params.structured_outputs, after, prompt.keys.owners.prompt
            )
        encode = self.preprocessor.tokenizer.encode_plain
        prediction = encode(params.prediction) if "suffix" in self.config.speculative else ()
        closing: list[int] = []
        if params.thinking_token_budget is not None:
            thought = thought or self._thought_of(prompt)
            closing = encode(self.config.thinking_budget_message) + self._thought_end
        request = Request(
            request_id=request_id or f"req-{secrets.token_hex(8)}",
            prompt=prompt,
            params=dataclasses.replace(params, prediction=""),
            on_delta=on_delta,
            priority=priority,
            cold=prompt.uncached,
            tenant=tenant,
            bad_words=find_bad_words(params.bad_words, encode),
            grammar=grammar,
            prediction=tuple(prediction),
            affinity=tuple(affinity),
            forced=tuple(map(tuple, forced)),
            thought=thought,
            closing=tuple(closing),
            complete_experts=complete_experts,
            next_turn=next_turn or _plain_turn(prompt),
            progress=progress,
            on_step=on_step,
        )
        self.begin(request)
        return request.request_id

    def begin(self, request: Request) -> None:
        """Queue a request that `submit` has made. Raise as `submit` does."""
        raise NotImplementedError

    @cached_property
    def _thought_end(self) -> list[int]:
        return self.preprocessor.tokenizer.encode(CLOSING)

    def _thought_of(self, prompt: Prompt) -> Thought:
        return Thought(begins_in_thought(self.text_of(prompt), continued=True), quiet=False)

    def before_grammar(self, prompt: Prompt, thought: Thought | None, *, splits: bool) -> bytes:
        """Return the text behind which a grammar applies; b"": it applies from the answer's start.

        Args:
            thought: of the answer; None: it is not known whether the prompt leaves one open.
            splits: thoughts are split off, so the prompt is searched for one.
        """
        opened = splits and leaves_thought_open(self.text_of(prompt))
        if thought is not None:
            opened = thought.opened
        mark = THINK_END + self.preprocessor.template_traits.separator
        return mark.encode() if opened else b""

    def text_of(self, prompt: Prompt) -> str:
        """Return the prompt's text, decoded if it came as tokens."""
        tokenizer = self.preprocessor.tokenizer
        return prompt.text or tokenizer.decode(prompt.token_ids, skip_special_tokens=False)


def with_prompts(stats: dict[str, Any], preprocessor: Preprocessor) -> dict[str, Any]:
    """Return an engine's counters with those of what makes its prompts."""
    uploads, frames = preprocessor.media_counts, preprocessor.raw_index.frames
    return stats | {
        "num_decoded_media": uploads["decoded"],
        "uploads": dict(uploads),
        "video_frames": dict(frames.counts),
        "known_text": preprocessor.known_text.counts,
        "held_bytes": stats["held_bytes"]
        | {
            "media_index": preprocessor.raw_index.num_bytes + frames.num_bytes,
            "known_text": preprocessor.known_text.num_bytes,
        },
    }
