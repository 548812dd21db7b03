"""Every published layout answers as transformers does, and its second turns hit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from parity import check, greedy
from parity_cases import photograph, user, video
from published_layouts import LAYOUTS, OLDER
from sweeps import quick

from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
TOKENS = 24
QUICK = ["Qwen3.5-4B", "Qwen3-0.6B"]
QUESTION = {"role": "user", "content": "Tell me about the sea and its 3 colours."}


def conversations(*, media: bool) -> list[list[dict[str, Any]]]:
    text = [QUESTION]
    if not media:
        return [text]
    picture = photograph("cell.png")
    return [text, [user(picture, "What is this?")], [user(video("bikes.mp4"), "What happens?")]]


@pytest.mark.parametrize("name", quick([each for each in LAYOUTS if each != OLDER], QUICK))
def test_prompts_and_greedy_tokens_equal_those_of_transformers(
    written: Callable[[str], Path], name: str
) -> None:
    path, media = written(name), bool(LAYOUTS[name].spec.vision_depth)
    options = EngineConfig(dtype="float32", block_size=16, cache_memory="64MiB")
    with Pipeline(path, options) as pipe:
        for chat in conversations(media=media):
            first, equal = check(pipe, path, [chat], TOKENS)
            assert all(each.acceptable for each in equal), name
            answer = {"role": "assistant", "content": first[0].text}
            following = [*chat, answer, {"role": "user", "content": "And now?"}]
            again, equal = check(pipe, path, [following], TOKENS)
            assert all(each.acceptable for each in equal), name
            # The next turn is found again up to the end of the question, its media included.
            prompt = first[0].usage.prompt_tokens
            assert again[0].usage.cached_tokens >= prompt - 16
            assert first[0].usage.cached_tokens == 0


@pytest.mark.sweep
def test_older_names_are_those_of_the_same_model(written: Callable[[str], Path]) -> None:
    options = EngineConfig(dtype="float32", block_size=16, cache_memory="64MiB")
    answers = []
    for name in ("Qwen3.6-27B", OLDER):
        with Pipeline(written(name), options) as pipe:
            chats = conversations(media=True)
            answers.append([each.token_ids for each in pipe.chat_many(chats, greedy(TOKENS))])
    assert answers[0] == answers[1]
