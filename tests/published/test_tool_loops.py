"""The next step of a loop of calls, which a client gives with its results, hits up to the end of
what it has in common with the step before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conversation import TOOLS
from parity import greedy
from published_layouts import LAYOUTS
from sweeps import quick

from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline

NAMES = [name for name, layout in LAYOUTS.items() if layout.spec.vision_depth]
BLOCK = 16


def step(number: int) -> list[dict[str, Any]]:
    call = {"name": "look", "arguments": {"at": f"the sea, place {number}", "n": number}}
    return [
        {
            "role": "assistant",
            "content": f"Place {number}.",
            "tool_calls": [{"id": str(number), "type": "function", "function": call}],
        },
        {"role": "tool", "tool_call_id": str(number), "content": f"{number} waves, all blue. " * 9},
    ]


@pytest.mark.parametrize("name", quick(NAMES, ["Qwen3.5-4B"]))
def test_each_step_hits_up_to_the_last_result(written: Callable[[str], Path], name: str) -> None:
    options = EngineConfig(dtype="float32", block_size=BLOCK, cache_memory="64MiB")
    chat: list[dict[str, Any]] = [{"role": "user", "content": "Look at the sea, three times."}]
    with Pipeline(written(name), options) as pipe:
        shared = 0
        for number in range(3):
            answer = pipe.chat(chat, greedy(2), tools=TOOLS)
            # What opens an answer is no part of the next step's prompt.
            assert answer.usage.cached_tokens >= shared - BLOCK
            chat, shared = chat + step(number), answer.usage.prompt_tokens
        assert answer.usage.cached_tokens > 0
