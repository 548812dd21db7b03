"""Every model that can be served: over HTTP, from Python, as a batch and as a plan."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from families import FAMILIES as SHAPES
from make_checkpoint import make_checkpoint
from serving import RunningServer, running

from vlm_serve.cli import main
from vlm_serve.commands import plan as plan_command
from vlm_serve.models.registry import FAMILIES
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.sampling_params import SamplingParams
from vlm_serve.server.config import ServerConfig

QUESTION = "What is red, what is blue, and which of the two is larger than the other one?"
CONFIG = EngineConfig(device="cpu", dtype="float32", block_size=16, cache_memory="32MiB")
FLAGS = ("--dtype", "float32", "--block-size", "16", "--cache-memory", "32MiB", "--no-idle-check")


@pytest.fixture(scope="module", params=FAMILIES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(kind), next(iter(SHAPES[kind].values())))


@pytest.fixture(scope="module")
def pipe(path: Path) -> Iterator[Pipeline]:
    with Pipeline(path, CONFIG, reasoning_parser="none") as made:
        yield made


@pytest.fixture(scope="module")
def server(pipe: Pipeline) -> Iterator[RunningServer]:
    with running(
        pipe.engine, ServerConfig(port=0, idle_check=False, reasoning_parser="none")
    ) as made:
        yield made


def picture() -> PIL.Image.Image:
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    return PIL.Image.fromarray(noise)


def body(*, media: bool, max_tokens: int = 12) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": QUESTION}]
    if media:
        file = io.BytesIO()
        picture().save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "temperature": 0, "max_tokens": max_tokens, "cache_report": True}


def text_of(answer: dict[str, Any]) -> str:
    text = answer["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


def test_answers_alike_everywhere(
    kind: str, path: Path, pipe: Pipeline, server: RunningServer, tmp_path: Path
) -> None:
    request = body(media=bool(FAMILIES[kind].media))
    cold, hit = (server.post("/v1/chat/completions", request).json() for _ in range(2))
    assert text_of(hit) == text_of(cold)
    assert cold["cache_report"]["reason"] == "cold"
    used, prompt = hit["cache_report"]["boundary"], hit["usage"]["prompt_tokens"]
    assert used >= prompt - 16 and hit["cache_report"]["media_encoded"] == 0

    parts = [{"type": "text", "text": QUESTION}]
    media = [{"type": "image", "image": picture()}] if FAMILIES[kind].media else []
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    output = pipe.chat([{"role": "user", "content": [*media, *parts]}], greedy)
    assert output.text == text_of(cold)

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": request}
    source.write_text(json.dumps(line) + "\n")
    files = ("-i", str(source), "-o", str(target), "--model", str(path))
    assert main(["run-batch", *files, *FLAGS, "--reasoning-parser", "none"]) == 0
    (row,) = map(json.loads, target.read_text().splitlines())
    assert text_of(row["response"]["body"]) == text_of(cold)


def test_what_takes_no_pictures_says_so(kind: str, server: RunningServer) -> None:
    response = server.post("/v1/chat/completions", body(media=True))
    assert response.status_code == (200 if FAMILIES[kind].media else 400)
    if response.status_code == 400:
        error = response.json()["error"]
        assert (error["message"], error["code"]) == ("this model takes no images", "no_media")
        assert error["param"] == "messages[0].content[0].image_url.url"


def test_the_plan_is_that_of_a_start(kind: str, path: Path, pipe: Pipeline) -> None:
    plan = plan_command.make(str(path), CONFIG)
    engine = pipe.engine
    assert (plan.memory, plan.weights) == (engine.memory, engine.weights)
    assert bool(plan.rows) == bool(engine.memory.num_live_rows) == FAMILIES[kind].state
    assert bool(plan.embedding_bytes) == bool(FAMILIES[kind].media)
    text = plan_command.render(plan)
    assert ("vision embeddings" in text) == bool(FAMILIES[kind].media)
    assert ("expert rows" in text) == FAMILIES[kind].experts
    assert ("interval (blocks)" in text) == FAMILIES[kind].state


@pytest.mark.usefixtures("compiler")
def test_steps_are_compiled_as_a_whole(kind: str, pipe: Pipeline) -> None:
    model = pipe.engine._loop._executor._model  # type: ignore[attr-defined]
    assert (model._compiled_step is not None) == FAMILIES[kind].compiled
