"""Answers that broke off on one replica go on on another one, with the same bytes."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
from attempts import PATHS, Asked, Replica, bytes_of, difference, random_request, undisturbed
from checkpoint_spec import CheckpointSpec
from guesses import draft_freely
from hostile_files import data_url, image_of
from make_checkpoint import make_checkpoint

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.failover.attempt import (
    ATTEMPT,
    PING,
    TOKENS,
    Attempt,
    Delivery,
    merged,
    new_token,
)

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 16,
    "cache_memory": "64MiB",
    "max_model_len": 1024,
    "max_num_seqs": 4,
    "threads": 1,
    "speculative": "off",  # What became of drafts is each replica's own.
}
ASKED = Asked(
    PATHS[0],
    {
        "messages": [{"role": "user", "content": "who paints the red house?"}],
        "stream": True,
        "max_tokens": 30,
        "temperature": 1.0,
        "cache_report": True,
        "stream_options": {"include_usage": True},
    },
)


class Pair:
    """Two replicas, and the loop that their applications run on."""

    def __init__(self, checkpoint: Path, **options: Any) -> None:
        config = EngineConfig(**(OPTIONS | options))
        self.runner = asyncio.Runner()
        self.engines = [Engine.from_checkpoint(str(checkpoint), config) for _ in range(2)]
        if config.speculative != "off":
            for engine in self.engines:
                draft_freely(engine)
        self.first, self.second = map(Replica, self.engines)

    def close(self) -> None:
        self.runner.run(self.first.service.close())
        self.runner.run(self.second.service.close())
        self.runner.close()


@pytest.fixture(scope="module")
def pair(checkpoint: Path) -> Iterator[Pair]:
    pair = Pair(checkpoint)
    yield pair
    pair.close()


def check_cases(pair: Pair, seeds: range, *, drafts: bool = False) -> None:
    async def cases() -> None:
        for seed in seeds:
            rng = random.Random(seed)
            asked = random_request(rng)
            pair.first.engine.flush()
            if rng.random() < 0.5:
                pair.second.engine.flush()
            else:
                await pair.second.answer(asked, None)
            case = await undisturbed(pair.first, asked, seed)
            wrong = await difference(case, pair.second, rng, drafts=drafts)
            assert wrong is None, f"seed {seed}, {asked}: {wrong}"

    pair.runner.run(cases())
    for engine in pair.engines:
        assert engine.stats()["replays"]["disagreements"] == 0
        engine.check()
    assert pair.second.engine.stats()["replays"]["tokens"] > 10 * len(seeds) // 4


@pytest.mark.parametrize("part", range(4))
def test_the_bytes_are_those_of_an_undisturbed_answer(pair: Pair, part: int) -> None:
    check_cases(pair, range(12 * part, 12 * part + 12))


def test_likewise_with_drafts(checkpoint: Path) -> None:
    pair = Pair(checkpoint, speculative="suffix")
    try:
        check_cases(pair, range(100, 112), drafts=True)
    finally:
        pair.close()


def test_experts_have_no_gaps_that_depend_on_the_cache(tmp_path: Path) -> None:
    """The first replica has the prompt without its experts, the second has nothing."""
    pair = Pair(make_checkpoint(tmp_path / "moe", CheckpointSpec(num_experts=4)))
    asked = Asked(PATHS[0], ASKED.body | {"return_routed_experts": True, "n": 2})
    try:

        async def case() -> None:
            plain = {**asked.body, "return_routed_experts": False}
            await pair.first.answer(Asked(asked.path, plain), None)
            answered = await undisturbed(pair.first, asked, 5)
            assert b'"routed_experts"' in answered.whole
            assert b"routed_experts_gaps" not in answered.whole
            for seed in range(4):
                assert await difference(answered, pair.second, random.Random(seed)) is None

        pair.runner.run(case())
    finally:
        pair.close()


def resumed(pair: Pair, messages: list[Any], attempt: Attempt, asked: Asked = ASKED) -> list[Any]:
    delivery = Delivery(attempt)
    for message in messages:
        delivery.passed(message)
    return pair.runner.run(pair.second.answer(asked, delivery.next))


def test_a_report_says_that_the_answer_was_resumed(pair: Pair) -> None:
    """And is the first replica's otherwise; once all tokens are there it says nothing of it."""
    pair.second.engine.flush()
    case = pair.runner.run(undisturbed(pair.first, ASKED, 1))
    case = pair.runner.run(undisturbed(pair.first, ASKED, 1))  # a hit this time
    rest = bytes_of(resumed(pair, case.messages[:5], case.attempt))
    assert b'"resumed":1' in rest and b'"reason":"full"' in rest
    whole = case.whole
    assert bytes_of(case.messages[:5]) + rest.replace(b',"resumed":1', b"") == whole
    covered = [index for index, message in enumerate(case.messages) if TOKENS in message]
    rest = bytes_of(resumed(pair, case.messages[: covered[-1] + 1], case.attempt))
    assert bytes_of(case.messages[: covered[-1] + 1]) + rest == whole


def test_a_silence_is_broken_on_both_replicas(checkpoint: Path) -> None:
    """A replica that is lost before its first token, or later, leaves no trace but comments."""
    pair = Pair(checkpoint)
    try:
        for replica in (pair.first, pair.second):
            object.__setattr__(replica.service.config, "stream_silence", 0.0001)
        whole = pair.runner.run(undisturbed(pair.first, ASKED, 3))
        pings = [at for at, message in enumerate(whole.messages) if message.get(PING)]
        assert pings[0] == 1, "behind the status, before any token"
        body = bytes_of([message for message in whole.messages if not message.get(PING)])
        for broken in (2, pings[-1] + 1, len(whole.messages) // 2):
            rest = resumed(pair, whole.messages[:broken], whole.attempt)
            told = [*whole.messages[:broken], *rest]
            told = [message for message in told if not message.get(PING)]
            assert bytes_of(told).replace(b',"resumed":1', b"") == body
    finally:
        pair.close()


def test_progress_of_a_prompt_is_no_part_of_the_answer(checkpoint: Path) -> None:
    """The second replica tells it again as long as nothing of the answer has been delivered."""
    fixed = {"max_num_batched_tokens": 64, "step_time_target": 0.0}
    pair = Pair(checkpoint, **fixed)
    long = {"messages": [{"role": "user", "content": "who paints the red house? " * 20}]}
    asked = Asked(PATHS[0], ASKED.body | long | {"return_progress": True, "return_token_ids": True})
    try:
        whole = pair.runner.run(undisturbed(pair.first, asked, 3))
        told = [at for at, message in enumerate(whole.messages) if message.get(PING)]
        assert told and told == list(range(1, len(told) + 1))
        body = bytes_of([message for message in whole.messages if not message.get(PING)])
        assert b"prompt_progress" not in body and b"prompt_token_ids" in body
        for broken in (2, told[-1] + 1, told[-1] + 2, len(whole.messages) // 2):
            pair.second.engine.flush()
            rest = resumed(pair, whole.messages[:broken], whole.attempt, asked)
            again = [message for message in rest if message.get(PING)]
            assert bool(again) == (broken <= told[-1] + 1)
            answer = [*whole.messages[:broken], *rest]
            answer = [message for message in answer if not message.get(PING)]
            assert bytes_of(answer).replace(b',"resumed":1', b"") == body
    finally:
        pair.close()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_what_a_comparison_has_told_stays_so(pair: Pair, path: str) -> None:
    """The second replica does not know the answer that the request is compared with."""
    said: dict[str, Any] = {"max_tokens": 30, "stream": True, "temperature": 1.0}
    if path == "/v1/messages":
        said["messages"] = [{"role": "user", "content": "who paints the red house?"}]
        name, field, asked = b"msg_", b"cache_miss_reason", "diagnostics"
        compared: dict[str, Any] = {"previous_message_id": None}
    else:
        said |= {"input": "who paints the red house?", "max_output_tokens": said.pop("max_tokens")}
        name, field, asked = b"resp_", b"prompt_cache_diagnostics", "prompt_cache_options"
        compared = {}
    first = pair.runner.run(undisturbed(pair.first, Asked(path, said | {asked: compared}), 1))
    answer = (name + first.whole.partition(name)[2].partition(b'"')[0]).decode()
    key = "previous_message_id" if asked == "diagnostics" else "comparison_response_id"
    other = {"system": "Be kind."} if asked == "diagnostics" else {"instructions": "Be kind."}
    case = pair.runner.run(
        undisturbed(pair.first, Asked(path, said | other | {asked: {key: answer}}), 1)
    )
    assert field in case.whole and b"not_found" not in case.whole
    again = Asked(path, said | other | {asked: {key: answer}})
    unknown = bytes_of(resumed(pair, [], case.attempt, again))
    assert b"not_found" in unknown, "nothing of it had been told"
    for broken in (2, len(case.messages) // 2):
        rest = resumed(pair, case.messages[:broken], case.attempt, again)
        assert bytes_of(case.messages[:broken]) + bytes_of(rest) == case.whole


def test_messages_say_which_tokens_they_cover(pair: Pair) -> None:
    asked = Asked(PATHS[0], ASKED.body | {"n": 3, "return_token_ids": True})
    case = pair.runner.run(undisturbed(pair.first, asked, 2))
    told: dict[int, list[int]] = {}
    shown: dict[int, list[int]] = {}
    for message in case.messages[1:]:
        for choice, ids in message.get(TOKENS, {}).items():
            told.setdefault(choice, []).extend(ids)
        for line in message["body"].splitlines():
            if line.startswith(b"data: {"):
                for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                    shown.setdefault(choice["index"], []).extend(choice.get("token_ids") or [])
    assert told == shown and set(told) == {0, 1, 2}
    assert not any(
        name.startswith("vlm_serve.")
        for message in pair.runner.run(pair.first.answer(asked, None))
        for name in message
    ), "who makes no attempts need not know"


def test_messages_may_be_merged(pair: Pair) -> None:
    asked = Asked(PATHS[0], ASKED.body | {"n": 2})
    case = pair.runner.run(undisturbed(pair.first, asked, 6))
    start, *parts = case.messages
    single, together = Delivery(case.attempt), Delivery(case.attempt)
    for message in case.messages:
        single.passed(message)
    groups = [merged(parts[place : place + 4]) for place in range(0, len(parts), 4)]
    for message in (start, *groups):
        together.passed(message)
    assert single.next == together.next and single.next.usage is not None
    assert bytes_of(groups) == case.whole and not groups[-1]["more_body"]
    rest = bytes_of(resumed(pair, [start, *groups[:2]], case.attempt, asked))
    assert (bytes_of(groups[:2]) + rest).replace(b',"resumed":1', b"") == case.whole


def test_nothing_is_tried_a_third_time(pair: Pair) -> None:
    attempt = Attempt(1, "id", 2, resumed=2, deaths=2, delivered=10, started=True)
    (start, body) = pair.runner.run(pair.second.answer(ASKED, attempt))
    assert start["status"] == 503
    assert json.loads(body["body"])["error"]["code"] == "resumed_twice"


def test_a_refusal_is_told_as_it_is(pair: Pair) -> None:
    """The replica cannot go on: its status says so, and nothing of its body is held back."""
    attempt = Attempt(1, "id", 2, deadline=time.time() - 1, resumed=1, delivered=50, started=True)
    start, body = pair.runner.run(pair.second.answer(ASKED, attempt))
    assert start["status"] == 504
    assert json.loads(body["body"])["error"]["code"] == "timeout"


def test_a_full_queue_refuses_no_answer_that_has_begun(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = pair.runner.run(undisturbed(pair.first, ASKED, 4))
    monkeypatch.setattr(pair.second.service.admission, "open_tokens", 1 << 40)
    (start, _) = pair.runner.run(pair.second.answer(ASKED, case.attempt))
    assert start["status"] == 503
    rest = bytes_of(resumed(pair, case.messages[:4], case.attempt))
    assert rest.endswith(b"data: [DONE]\n\n")


def test_tokens_of_another_answer_are_refused(pair: Pair) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    body = ASKED.body | off | {"structured_outputs": {"regex": "[ab]{9}"}}
    tokens = {0: (pair.engines[0].preprocessor.tokenizer.encode_plain("zzz")[0],)}
    attempt = Attempt(1, "id", 2, tokens=tokens, resumed=1, delivered=5, started=True)
    messages = pair.runner.run(pair.second.answer(Asked(PATHS[0], body), attempt))
    assert b"is forbidden by the" in bytes_of(messages) and messages[0]["status"] == 400
    attempt = Attempt(1, "id", 2, tokens={0: (10**6,)}, resumed=1, delivered=5, started=True)
    messages = pair.runner.run(pair.second.answer(ASKED, attempt))
    assert b"vocabulary" in bytes_of(messages) and messages[0]["status"] == 400


def test_a_failure_in_the_middle_of_a_replay_is_told_whole(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be taken for bytes that have been delivered."""
    case = pair.runner.run(undisturbed(pair.first, ASKED, 3))
    executor = pair.second.engine._loop._executor
    run, most = executor.run, pair.second.engine.num_steps + 2

    def failing(plan: Any) -> Any:
        if pair.second.engine.num_steps >= most:
            raise RuntimeError("on purpose")
        return run(plan)

    monkeypatch.setattr(executor, "run", failing)
    rest = bytes_of(resumed(pair, case.messages[:-3], case.attempt))
    assert rest.startswith(b'data: {"error"') and b"made the model's step fail" in rest


def test_no_header_makes_an_attempt(pair: Pair) -> None:
    """Nor any other thing that a client sends: names of the scope are no names of headers."""
    given = Attempt(1, "given", 2, resumed=2)
    value = repr(given).encode()
    names = (ATTEMPT, f"x-{ATTEMPT}", "vlm_serve-attempt", "x-vlm-serve-attempt", "attempt")
    headers = [(name.encode(), value) for name in names]
    asked = Asked(PATHS[0], {"messages": ASKED.body["messages"], "max_tokens": 5, ATTEMPT: "x"})
    start, answer = pair.runner.run(pair.first.answer(asked, None, headers))
    assert start["status"] == 200
    assert b"given" not in answer["body"] and set(answer) == {"type", "body"}


def test_an_attempt_is_plain_data() -> None:
    attempt = Attempt.first("some id", deadline=7.5)
    assert 0 <= attempt.seed < 2**62 and abs(attempt.created - time.time()) < 60
    assert pickle.loads(pickle.dumps(attempt)) == attempt
    assert attempt.token("call", 0) == attempt.token("call", 0) != attempt.token("call", 1)
    assert new_token(None, "call", 0) != new_token(None, "call", 0)
    assert Attempt(attempt.seed + 1, "some id", 0).token("call", 0) != attempt.token("call", 0)


def test_who_asks_replicas_needs_no_torch() -> None:
    code = "import sys, vlm_serve.server.failover.attempt; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_named_picture_is_resumed_where_it_is_known_and_refused_elsewhere(pair: Pair) -> None:
    """Never with another picture: a replica that lacks the name ends the answer."""
    url = data_url("image/png", image_of("PNG", 64, 64))
    text = {"type": "text", "text": "What?"}

    def asked(**image: Any) -> Asked:
        content = [{"type": "image_url", **image}, text]
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0}
        return Asked(PATHS[0], body | {"stream": True, "max_tokens": 12, "ignore_eos": True})

    async def resumed(*, known: bool) -> list[MutableMapping[str, Any]]:
        await pair.first.answer(asked(image_url={"url": url}, uuid="p"), None)
        held = pair.second.service.state.media
        assert held is not None
        held.clear()
        if known:
            await pair.second.answer(asked(image_url={"url": url}, uuid="p"), None)
        named, attempt = asked(image_url=None, uuid="p"), Attempt.first("one", None)
        whole = await pair.first.answer(named, attempt)
        delivery = Delivery(attempt)
        for message in whole[:5]:
            delivery.passed(message)
        rest = await pair.second.answer(named, delivery.next)
        if known:
            assert bytes_of(whole[:5]) + bytes_of(rest) == bytes_of(whole)
        return rest

    assert pair.runner.run(resumed(known=True))
    start, *body = pair.runner.run(resumed(known=False))
    assert start["status"] == 409 and b"media_not_held" in bytes_of(body)
