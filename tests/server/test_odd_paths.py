"""No path is an accident: what names nothing is refused in the API's own form."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator

import pytest
from fake_engine import FakeEngine
from odd_paths import odd_targets, wrong_answers
from serving import RunningServer, running

from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.app import routed
from vlm_serve.server.config import ServerConfig


@pytest.fixture(scope="module", params=["bare", "everything"])
def server(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Iterator[RunningServer]:
    bare = request.param == "bare"
    options = (
        {"page": False}
        if bare
        else {"response_store": "1MiB", "batch_store": "1MiB", "allowed_origins": ("*",)}
    )
    with running(FakeEngine(tokenizer), ServerConfig(port=0, **options)) as server:
        yield server


def test_odd_paths_of_every_route_are_refused(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    targets = list(odd_targets(routed(server.service)))
    assert len(targets) > 500 and "/v1/models/" in targets
    with caplog.at_level(logging.WARNING):
        assert wrong_answers(server.url, targets) == []
    assert caplog.records == []
    assert server.client.get("/v1/models/test-model").status_code == 200


@pytest.mark.parametrize("name", ["", "/", "test-model/", "%2F", "%00", "test-model%0A"])
def test_a_model_is_what_its_name_says_letter_by_letter(server: RunningServer, name: str) -> None:
    answer = server.client.get(f"/v1/models/{name}")
    assert answer.status_code == 404 and answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/x", "/load", "/metrics"])
def test_what_a_handler_did_not_expect_is_an_error_of_the_api(
    server: RunningServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(server.service.admission, "memory")
    for name in ("model_names", "metrics"):
        monkeypatch.delattr(server.service.state, name)
    answer = server.client.get(path)
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"


def test_parameters_of_paths_are_described(server: RunningServer) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    for path, methods in paths.items():
        for method in methods.values():
            names = [each["name"] for each in method.get("parameters", ()) if each["in"] == "path"]
            assert names == re.findall(r"\{(\w+)\}", path)
