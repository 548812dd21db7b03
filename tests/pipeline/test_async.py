"""The pipeline in an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vlm_serve import EngineConfig, Pipeline, SamplingParams, StructuredOutputs
from vlm_serve.errors import EngineClosedError, InvalidRequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
ENDLESS = SamplingParams(max_tokens=400, ignore_eos=True)
ANSWER = "Hello! Ask me about a picture or a video."


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    with Pipeline("demo", EngineConfig(cache_memory="64MiB", threads=1)) as made:
        yield made


def test_answers_come_beside_each_other(pipe: Pipeline) -> None:
    async def ask() -> list[str]:
        answers = await asyncio.gather(*(pipe.achat("Hello", GREEDY) for _ in range(5)))
        return [answer.text for answer in answers]

    assert asyncio.run(ask()) == [ANSWER] * 5


def test_a_stream_equals_the_answer(pipe: Pipeline) -> None:
    async def read(params: SamplingParams) -> str:
        return "".join([delta.text async for delta in pipe.astream("Hello", params)])

    for params in (GREEDY, SamplingParams(structured_outputs=StructuredOutputs(choice=("red",)))):
        assert asyncio.run(read(params)) == pipe.chat("Hello", params).text


def test_errors_are_those_of_chat(pipe: Pipeline) -> None:
    with pytest.raises(InvalidRequestError, match="belongs to params"):
        asyncio.run(pipe.achat("Hello", max_tokens=3))
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        asyncio.run(pipe.achat(("What?", "nope.png")))
    with Pipeline("demo", EngineConfig(cache_memory="64MiB", threads=1)) as other:
        other.close()
        with pytest.raises(EngineClosedError):
            asyncio.run(other.achat("Hello"))


async def _stream_a_little(pipe: Pipeline) -> None:
    async for _ in pipe.astream("Hello", ENDLESS):
        await asyncio.sleep(60)


@pytest.mark.parametrize("ask", [lambda pipe: pipe.achat("Hello", ENDLESS), _stream_a_little])
@pytest.mark.parametrize("submitted", [False, True])
def test_a_cancelled_caller_aborts_its_request(
    pipe: Pipeline, ask: Callable[[Pipeline], Any], submitted: bool
) -> None:
    """Whether or not a thread is still busy with its prompt."""

    async def cancel() -> None:
        task = asyncio.create_task(ask(pipe))
        while not submitted or not pipe.engine.num_running:
            await asyncio.sleep(0)
            if not submitted:
                break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert pipe.chat("Hello", GREEDY).text == ANSWER
    while pipe.engine.num_running or pipe.engine.num_waiting:
        pipe.engine.call(lambda: None)
