"""lmms-eval asks about videos: its own model class against a real server.

Its packages take several hundred megabytes, so they are no development dependencies: `make
test-lmms` installs them into a folder of their own and runs this file, which no other run collects.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
from clip_server import CLIP, QUESTION, clip_server, clips
from serving import RunningServer


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[RunningServer]:
    with clip_server(checkpoint) as made:
        yield made


def test_it_asks_about_a_video(server: RunningServer) -> None:
    model_class, instance_class = _lmms_eval()
    spent = []
    for max_frames in (4, 8):
        model = model_class(
            model_version="test-model",
            base_url=f"{server.url}/v1",
            api_key="none",
            max_retries=1,
            max_frames_num=max_frames,
            pass_video_url=True,
            httpx_trust_env=False,
        )
        model.task_dict = {"clips": {"test": [{"video": str(clips() / CLIP)}]}}
        arguments = ("", _messages, {"max_new_tokens": 4}, 0, "clips", "test")
        metadata = {"task": "clips", "doc_id": 0, "repeats": 1}
        request = instance_class("generate_until", arguments, 0, metadata)
        (answer,) = model.generate_until([request])
        model.client.close()
        assert "REQUEST_FAILED" not in answer.text
        spent.append(answer.token_counts.input_tokens)
    assert 0 < spent[0] < spent[1]


def _messages(document: dict[str, str]) -> list[dict[str, Any]]:
    content = [
        {"type": "video", "url": document["video"]},
        {"type": "text", "text": QUESTION},
    ]
    return [{"role": "user", "content": content}]


def _lmms_eval() -> tuple[Any, Any]:
    oracle.prepare_torchvision()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        models = importlib.import_module("lmms_eval.models.chat.openai")
        instance = importlib.import_module("lmms_eval.api.instance")
    return models.OpenAICompatible, instance.Instance
