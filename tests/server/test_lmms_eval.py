"""lmms-eval's requests about videos, in their form from the client library that it uses. Its own
class asks in `lmms/`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from clip_server import CLIP, QUESTION, clip_server, clips
from serving import RunningServer

if TYPE_CHECKING:
    import openai


@pytest.fixture(autouse=True, scope="module")
def _client_library() -> None:
    """Import it when tests run: that takes a second, for which no collection waits."""
    global openai
    import openai


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[RunningServer]:
    with clip_server(checkpoint) as made:
        yield made


def test_a_request_of_its_form(server: RunningServer) -> None:
    """`openai` with `pass_video_url`: the video by its URL, the frames in `media_io_kwargs`."""
    url = f"file://{clips() / CLIP}"
    content: Any = [
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "text", "text": QUESTION},
    ]
    tokens: dict[int, int] = {}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for num_frames in (4, 8, 4):
            answer = client.chat.completions.create(
                model="test-model",
                messages=[{"role": "user", "content": content}],
                max_tokens=4,
                temperature=0,
                extra_body={"media_io_kwargs": {"video": {"num_frames": num_frames}}},
            )
            assert answer.usage is not None
            assert answer.choices[0].message.content is not None
            before = tokens.setdefault(num_frames, answer.usage.prompt_tokens)
            assert before == answer.usage.prompt_tokens
    assert tokens[4] < tokens[8]
