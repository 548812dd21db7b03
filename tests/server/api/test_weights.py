"""The weights of a server are changed over HTTP, by whoever may."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, cast

import pytest
from engine_forms import FORMS
from families import SPECS
from make_checkpoint import make_checkpoint
from safetensors.torch import load_file, save, save_file
from serving import RunningServer, chat_body, running

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.api.weights import _is_local
from vlm_serve.server.config import ServerConfig

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
UPDATE = "/update_weights_from_disk"
FROM_TENSOR = "/update_weights_from_tensor"


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> Callable[[str, EngineConfig], Engine]:
    return cast("Callable[[str, EngineConfig], Engine]", request.param)


@pytest.fixture(scope="module")
def place(form: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, another one that may be taken, and one elsewhere."""
    root, spec = tmp_path_factory.mktemp("weights"), SPECS["text, tied"]
    first = make_checkpoint(root / "model", spec)
    second = make_checkpoint(root / "allowed" / "second", replace(spec, seed=105))
    for file in first.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, second)
    shutil.copytree(first, root / "allowed" / "first")
    shutil.copytree(first, root / "elsewhere")
    return root


def config() -> EngineConfig:
    return EngineConfig(
        device="cpu",
        dtype="float32",
        block_size=16,
        cache_memory="16MiB",
        allow_weight_updates=True,
    )


@pytest.fixture(scope="module")
def server(form: Callable[[str, EngineConfig], Engine], place: Path) -> Iterator[RunningServer]:
    allowed = ServerConfig(port=0, allowed_weights_path=str(place / "allowed"))
    with running(form(str(place / "model"), config()), allowed) as made:
        yield made


def ask(server: RunningServer) -> tuple[str, dict[str, Any]]:
    text = "Tell me about the river, its boats and the people on them."
    answer = server.post("/v1/chat/completions", chat_body(text, cache_report=True, **GREEDY))
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return json.dumps(body["choices"][0]["message"]), body["cache_report"]


def info(server: RunningServer, path: str = "/server_info") -> dict[str, Any]:
    return cast("dict[str, Any]", server.client.get(path).json())


def test_an_update_and_back(server: RunningServer) -> None:
    old, report = ask(server)
    digest = info(server)["weights"]
    assert report["weights"] == digest and "weight_changes" not in report
    answer = server.post(UPDATE, {"model_path": "second", "weight_version": "step 2"})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["success"] and body["weight_version"] == "step 2" and body["weights"] != digest
    assert info(server)["weights"] == body["weights"]
    assert info(server, "/get_model_info")["weight_version"] == "step 2"
    new, report = ask(server)
    assert new != old and report["weights"] == body["weights"] and report["boundary"] == 0
    assert ask(server)[1]["boundary"] > 0
    back = server.post(UPDATE, {"model_path": "first", "load_format": "safetensors"}).json()
    assert (back["weights"], back["weight_version"]) == (digest, "step 2")
    again, report = ask(server)
    assert again == old and report["boundary"] > 0
    emptied = {"model_path": "first", "flush_cache": True, "abort_all_requests": True}
    assert server.post(UPDATE, emptied).status_code == 200
    assert ask(server)[1]["boundary"] == 0


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"model_path": "../elsewhere"}, "allowed_weights_path"),
        ({"model_path": "none"}, "allowed_weights_path"),
        ({"model_path": "first", "load_format": "dummy"}, "load_format"),
        ({"model_path": "first", "is_async": True}, "is_async"),
        ({}, "model_path"),
    ],
)
def test_bad_requests_change_nothing(
    server: RunningServer, body: dict[str, Any], problem: str
) -> None:
    digest = info(server)["weights"]
    answer = server.post(UPDATE, body)
    assert answer.status_code == 400 and problem in answer.text
    assert info(server)["weights"] == digest


def test_a_folder_that_does_not_fit(server: RunningServer, place: Path) -> None:
    (place / "allowed" / "empty").mkdir(exist_ok=True)
    answer = server.post(UPDATE, {"model_path": "empty"})
    assert answer.status_code == 400 and "no safetensors files" in answer.text


@pytest.fixture
def segment() -> Iterator[SharedMemory]:
    """Shared memory of another size than any image."""
    made = SharedMemory(create=True, size=64)
    yield made
    made.close()
    made.unlink()


def test_tensors_come_from_shared_memory(server: RunningServer, place: Path) -> None:
    """The trainer that leaves them there removes them after the answer."""
    assert server.post(UPDATE, {"model_path": "first"}).status_code == 200
    old = ask(server)[0]
    file = next((place / "allowed" / "second").glob("*.safetensors"))
    part = {name: each for name, each in load_file(file).items() if "embed_tokens" in name}
    image = save(part)
    made = SharedMemory(create=True, size=len(image))
    try:
        cast("memoryview", made.buf)[:] = image
        body = {"shared_memory": made.name, "weight_version": "half", "load_format": "auto"}
        answer = server.post(FROM_TENSOR, body)
    finally:
        made.close()
        made.unlink()
    assert answer.status_code == 200, answer.text
    assert answer.json()["weights"] == info(server)["weights"]
    assert answer.json()["weight_version"] == "half"
    new, report = ask(server)
    assert new != old and report["boundary"] == 0
    mixed = shutil.copytree(place / "allowed" / "first", place / "allowed" / "mixed")
    (target,) = mixed.glob("*.safetensors")
    save_file(load_file(target) | part, target)
    same = server.post(UPDATE, {"model_path": "mixed"}).json()
    assert same["weights"] == answer.json()["weights"] and ask(server)[1]["boundary"] > 0
    shutil.rmtree(mixed)


def test_what_is_no_segment_changes_nothing(
    server: RunningServer, place: Path, segment: SharedMemory
) -> None:
    digest = info(server)["weights"]
    link = Path("/dev/shm") / f"{segment.name}-link"
    link.symlink_to(next((place / "elsewhere").glob("*.safetensors")))
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"shared_memory": segment.name}, "not a readable safetensors file"),
        ({"shared_memory": f"/{segment.name}", "load_format": "flattened_bucket"}, "load_format"),
        ({"serialized_named_tensors": ["gASV"]}, "pickles"),
        *(
            ({"shared_memory": name}, "names no segment")
            for name in ("", "..", "nothing-of-that-name", "../shm/x", "\0", link.name)
        ),
    ]
    try:
        for body, problem in bodies:
            answer = server.post(FROM_TENSOR, body)
            assert answer.status_code == 400 and problem in answer.text, answer.text
            field = "shared_memory" if len(body) == 1 else "load_format"
            field = "serialized_named_tensors" if "gASV" in str(body) else field
            assert answer.json()["error"]["param"] == field
    finally:
        link.unlink()
    assert info(server)["weights"] == digest


def test_segments_of_others_are_refused(server: RunningServer, segment: SharedMemory) -> None:
    if os.geteuid():
        pytest.skip("only root can give a segment away")
    os.chown(f"/dev/shm/{segment.name}", 65534, 65534)
    answer = server.post(FROM_TENSOR, {"shared_memory": segment.name})
    assert answer.status_code == 400 and "another user" in answer.text


def test_who_may_not(place: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("tenant: salt\n")
    allowed = ServerConfig(
        port=0,
        allowed_weights_path=str(place / "allowed"),
        api_key=("operator",),
        tenant_keys=str(keys),
    )
    body = {"model_path": "first"}
    with running(Engine.from_checkpoint(str(place / "model"), config()), allowed) as made:
        for key, status in (("tenant", 403), ("operator", 200), ("nobody", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert made.client.post(UPDATE, json=body, headers=headers).status_code == status
            tensors = made.client.post(FROM_TENSOR, json={}, headers=headers)
            assert tensors.status_code == (400 if status == 200 else status)
    fixed = replace(config(), allow_weight_updates=False)
    open_to_all = ServerConfig(port=0, allowed_weights_path=str(place / "allowed"))
    with running(Engine.from_checkpoint(str(place / "model"), fixed), open_to_all) as made:
        answer = made.post(UPDATE, body)
        assert answer.status_code == 400 and "--allow-weight-updates" in answer.text
        assert "--allow-weight-updates" in made.post(FROM_TENSOR, {}).text
    nowhere = ServerConfig(port=0)
    with running(Engine.from_checkpoint(str(place / "model"), config()), nowhere) as made:
        assert "--allowed-weights-path" in made.post(UPDATE, body).text


def test_which_clients_are_of_this_machine() -> None:
    for client in (None, ("", 0), ("127.0.0.1", 9), ("127.3.2.1", 9), ("::1", 9)):
        assert _is_local(client)
    for client in (("10.0.0.1", 9), ("::ffff:10.0.0.1", 9), ("fe80::1", 9), ("here", 9)):
        assert not _is_local(client)
