"""lmms-eval asks about pictures and videos: its own client against a real server, and its command
by way of `vlm-serve eval lmms`.

Its packages take several hundred megabytes, so they are no development dependencies: `make
test-lmms` installs them into a folder of their own and runs this file, which no other run collects.
"""

from __future__ import annotations

import importlib
import json
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
from clip_server import CLIP, QUESTION, clip_server, clips
from serving import RunningServer

from vlm_serve.cli import main

ROOT = Path(__file__).parents[3]
START = shlex.join([sys.executable, str(Path(__file__).with_name("start.py"))])


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


def test_its_tasks_are_answered_the_same_with_and_without_caching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures and videos, against a server and through the pipeline."""
    status, report = evaluate(tmp_path, monkeypatch, "demo_pictures,demo_videos", ROOT)
    assert status == 0
    assert (report["items"], report["equal"]) == (56, 56)
    assert [part["name"] for part in report["parts"]] == [
        "lmms-eval, server",
        "lmms-eval, pipeline",
    ]
    for part in report["parts"]:
        cached, uncached = part["with_caching"], part["without_caching"]
        assert uncached["cached_tokens"] == 0
        assert cached["prompt_tokens"] == uncached["prompt_tokens"] > 1000
        assert cached["hit_rate"] > 0.4
        assert set(part["accuracy"]) == {"all", "demo_pictures", "demo_videos"}
        assert part["accuracy"]["all"]["right"] >= 14, "it was trained on such scenes"
    server, pipeline = (
        {each["item"]: each["answers"] for each in part["answers"]} for part in report["parts"]
    )
    assert server == pipeline
    assert {each["finish_reasons"][0] for each in report["parts"][1]["answers"]} == {"stop"}


@pytest.mark.parametrize("through", ["server", "pipeline"])
def test_a_request_that_fails_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    """lmms-eval itself scores it 0 and ends with status 0."""
    folder = tmp_path / "examples" / "eval"
    shutil.copytree(ROOT / "examples" / "eval", folder)
    (folder / "clip-2.mp4").write_bytes(b"no video")
    more = ("--through", through, "--limit", "5")
    status, report = evaluate(tmp_path, monkeypatch, "demo_videos", tmp_path, *more)
    assert status == 3
    assert (report["equal"], report["failed"], report["different"]) == (4, 1, 0)
    (part,) = report["parts"]
    assert {each["item"] for each in part["failures"]} == {"demo_videos/4"}


def test_a_run_without_answers_says_what_lmms_eval_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(FileNotFoundError):
        evaluate(tmp_path, monkeypatch, "no_such_task", ROOT, "--through", "server")
    assert "no_such_task" in capsys.readouterr().err


def evaluate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tasks: str, root: Path, *more: str
) -> tuple[int, Any]:
    """The exit status of `vlm-serve eval lmms` with the tasks below a folder, and its report."""
    monkeypatch.chdir(root)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    output = tmp_path / "report.html"
    command = ["eval", "lmms", "demo", "--tasks", tasks, "--lmms-eval", START]
    command += ["--include-path", str(root / "examples" / "eval" / "lmms"), "--timeout", "500"]
    command += ["--cache-memory", "64MiB", "--allowed-local-media-path", str(root), *more]
    status = main([*command, "-o", str(output)])
    return status, json.loads(output.with_suffix(".json").read_text(encoding="utf-8"))


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
