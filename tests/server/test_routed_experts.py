"""Routed experts over HTTP: base64 of an .npy file on every choice, as RL trainers read it."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from serving import RunningServer, chat_body, running

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

LAYERS, TOP_K = 4, 2
FIELDS: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": 6,
    "ignore_eos": True,
    "return_routed_experts": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    spec = CheckpointSpec(num_layers=LAYERS, num_experts=8, experts_per_token=TOP_K, vision_depth=0)
    path = make_checkpoint(tmp_path_factory.mktemp("moe"), spec)
    config = EngineConfig(dtype="float32", block_size=16, cache_memory="32MiB", max_model_len=512)
    with running(Engine.from_checkpoint(str(path), config), ServerConfig(port=0)) as made:
        yield made


def rows_of(choice: dict[str, Any]) -> npt.NDArray[Any]:
    file = io.BytesIO(base64.b64decode(choice["routed_experts"], validate=True))
    rows: npt.NDArray[Any] = np.load(file, allow_pickle=False)
    assert rows.dtype == np.uint8
    return rows


def test_both_routes_whole_and_streamed(server: RunningServer) -> None:
    chat = chat_body("Where do my tokens go?", **FIELDS)
    whole = server.post("/v1/chat/completions", chat).json()
    rows = rows_of(whole["choices"][0])
    assert rows.shape == (whole["usage"]["total_tokens"] - 1, LAYERS, TOP_K)
    assert "routed_experts_gaps" not in whole["choices"][0]

    chunks = server.stream("/v1/chat/completions", chat)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [bool(part["finish_reason"]) for part in parts] == ["routed_experts" in p for p in parts]
    assert np.array_equal(rows_of(parts[-1]), rows)

    plain = {"prompt": whole["prompt_token_ids"], **FIELDS}
    completion = server.post("/v1/completions", plain).json()
    assert np.array_equal(rows_of(completion["choices"][0]), rows)
    parts = [chunk["choices"][0] for chunk in server.stream("/v1/completions", plain)]
    assert [bool(part["finish_reason"]) for part in parts] == ["routed_experts" in p for p in parts]
    assert np.array_equal(rows_of(parts[-1]), rows)


def test_every_choice_has_its_own_and_the_prompt_may_be_left_out(server: RunningServer) -> None:
    body = server.chat("Twice, please.", **FIELDS, n=2).json()
    assert len([rows_of(choice) for choice in body["choices"]]) == 2
    start = body["usage"]["prompt_tokens"] - 1
    short = server.chat("Twice, please.", **FIELDS, routed_experts_prompt_start=start).json()
    assert np.array_equal(rows_of(short["choices"][0]), rows_of(body["choices"][0])[start:])


def test_gaps_are_named(server: RunningServer) -> None:
    text = "These tokens were computed when nobody asked for their experts, and never again."
    server.chat(text, **(FIELDS | {"return_routed_experts": False}))
    body = server.chat(text, **FIELDS, cache_report=True).json()
    cached = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert body["choices"][0]["routed_experts_gaps"] == [[0, cached]]
    assert body["cache_report"]["experts_missing"] == cached
    assert not rows_of(body["choices"][0])[:cached].any()


def test_nothing_is_added_unless_asked_for(server: RunningServer) -> None:
    body = server.chat("Nothing.", max_tokens=2).json()
    assert "routed_experts" not in body["choices"][0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"return_routed_experts": "yes"}, "return_routed_experts"),
        ({"routed_experts_prompt_start": 1}, "routed_experts_prompt_start"),
        (
            {"return_routed_experts": True, "routed_experts_prompt_start": -1},
            "routed_experts_prompt_start",
        ),
        (
            {"return_routed_experts": True, "routed_experts_prompt_start": 10**6},
            "routed_experts_prompt_start",
        ),
    ],
)
def test_bad_values_are_refused(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    response = server.chat(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
