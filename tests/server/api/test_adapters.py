"""Adapters over HTTP: asked for as models, listed, loaded and unloaded."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from engine_forms import FORMS
from families import SPECS
from make_checkpoint import make_checkpoint
from peft_folders import random_adapter
from safetensors.torch import load_file, save_file
from serving import RunningServer, chat_body, running

from vlm_serve.deploy.request_keys import keys_of
from vlm_serve.engine.engine import Engine
from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> Callable[[str, EngineConfig], Engine]:
    return cast("Callable[[str, EngineConfig], Engine]", request.param)


@pytest.fixture(scope="module")
def place(form: object, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the folders of a form of engine, since tests leave adapters there."""
    root = tmp_path_factory.mktemp("adapters")
    path = make_checkpoint(root / "model", SPECS["text, tied"])
    for seed in range(3):
        random_adapter(path, root / "allowed" / str(seed), seed)
    random_adapter(path, root / "elsewhere", 9)
    return root


@pytest.fixture(scope="module")
def server(form: Callable[[str, EngineConfig], Engine], place: Path) -> Iterator[RunningServer]:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        block_size=16,
        cache_memory="16MiB",
        lora_modules=(f"tuned={place / 'allowed' / '0'}",),
    )
    engine = form(str(place / "model"), config)
    allowed = ServerConfig(
        port=0, allow_runtime_lora=True, allowed_lora_path=str(place / "allowed")
    )
    with running(engine, allowed) as made:
        yield made


def ask(server: RunningServer, model: str | None, **fields: Any) -> tuple[str, int]:
    """The answer's message and the number of cached tokens."""
    body = chat_body("Tell me about the river and its boats.", model=model, **GREEDY, **fields)
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    value = answer.json()
    assert value["model"] == (model or "test-model")
    return json.dumps(value["choices"][0]["message"]), value["usage"]["prompt_tokens_details"][
        "cached_tokens"
    ]


def test_a_request_names_the_adapter_as_its_model(server: RunningServer) -> None:
    salt = {"cache_salt": "named"}
    plain, tuned = ask(server, None, **salt), ask(server, "tuned", **salt)
    assert plain[0] != tuned[0] and not tuned[1]
    again = ask(server, "tuned", **salt)
    assert again[0] == tuned[0] and again[1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 16, "temperature": 0}),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0},
        ),
        (
            "/inference/v1/generate",
            {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4, "temperature": 0}},
        ),
        ("/v1/cache/probe", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)
def test_every_api_takes_the_name(server: RunningServer, path: str, body: dict[str, Any]) -> None:
    before = server.engine.stats()["num_steps"]
    answer = server.post(path, {**body, "model": "tuned"})
    assert answer.status_code == 200, answer.text
    assert server.post(path, {**body, "model": "tuned?"}).status_code == 404
    if path != "/v1/cache/probe":
        assert answer.json()["model"] == "tuned"
        assert server.engine.stats()["num_steps"] > before
        roots = {entry.root for entry in server.engine.mirror.listing().entries}
        own = server.engine.adapters.find("tuned").identity.whole
        assert server.engine.preprocessor.root_key("", own) in roots or path.endswith("generate")


def test_lists_name_the_model_behind_an_adapter(server: RunningServer) -> None:
    cards = {each["id"]: each for each in server.client.get("/v1/models").json()["data"]}
    assert cards["test-model"]["parent"] is None
    assert cards["tuned"]["parent"] == "test-model"
    assert server.client.get("/v1/models/tuned").json()["root"] == "tuned"
    missing = server.client.get("/v1/models/other")
    assert missing.status_code == 404 and "test-model, tuned" in missing.text


def test_files_of_an_adapter_lie_below_the_allowed_folder(
    server: RunningServer, place: Path
) -> None:
    """A link may lead elsewhere below it, and the folder may change while it is loaded."""
    inside = place / "allowed" / "linked"
    inside.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (inside / name).symlink_to(f"../1/{name}")
    load = {"lora_name": "linked", "lora_path": "linked"}
    answer = server.post("/v1/load_lora_adapter", load)
    assert answer.status_code == 200, answer.text
    assert ask(server, "linked", cache_salt="linked")[0]
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "linked"}).status_code == 200
    for name in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"):
        (inside / name).unlink(missing_ok=True)
        (inside / name).symlink_to(f"../../elsewhere/{name}")
        answer = server.post("/v1/load_lora_adapter", load)
        assert answer.status_code == 400 and f"{name} leads out" in answer.text
        (inside / name).unlink()
        if name != "tokenizer.json":
            (inside / name).symlink_to(f"../1/{name}")


def test_an_absurd_adapter_ends_its_answers_alone(server: RunningServer, place: Path) -> None:
    """Its numbers are finite and what the model makes of them is not; the error names it."""
    wild = place / "allowed" / "wild"
    wild.mkdir()
    tensors = load_file(place / "allowed" / "1" / "adapter_model.safetensors")
    save_file(
        {name: each * 1e17 for name, each in tensors.items()}, wild / "adapter_model.safetensors"
    )
    (wild / "adapter_config.json").write_text(
        (place / "allowed" / "1" / "adapter_config.json").read_text()
    )
    load = {"lora_name": "wild", "lora_path": "wild"}
    assert server.post("/v1/load_lora_adapter", load).status_code == 200
    expected, before = ask(server, None, cache_salt="w1"), server.engine.stats()["num_unsound"]
    body = chat_body("Tell me about the river and its boats.", model="wild", **GREEDY)
    with ThreadPoolExecutor(4) as pool:
        plain = [pool.submit(ask, server, None, cache_salt=f"w{n}") for n in range(2, 4)]
        ended = [
            pool.submit(server.post, "/v1/chat/completions", body | more)
            for more in ({}, {"temperature": 1.0}, {"logprobs": True}, {"n": 2, "temperature": 1})
        ]
    for each in ended:
        answer = each.result()
        assert answer.status_code == 500, answer.text
        error = answer.json()["error"]
        assert error["message"].startswith("the adapter 'wild' has computed what is no finite")
        assert error["code"] == "not_a_number"
    assert [each.result() for each in plain] == [expected] * 2
    streamed = server.post("/v1/chat/completions", body | {"stream": True})
    assert "the adapter 'wild' has computed" in streamed.text
    assert server.engine.stats()["num_unsound"] == before + 5
    counted = f'vlm_serve:num_requests_not_a_number_total{{model_name="test-model"}} {before + 5}.0'
    assert counted in server.client.get("/metrics").text
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "wild"}).status_code == 200


def test_adapters_come_and_go(server: RunningServer, place: Path) -> None:
    load = {"lora_name": "late", "lora_path": "1"}
    assert server.post("/v1/load_lora_adapter", load).status_code == 200
    first, _ = ask(server, "late", cache_salt="late")
    taken = server.post("/v1/load_lora_adapter", load)
    assert taken.status_code == 400 and "is taken" in taken.text
    gone = server.post("/v1/unload_lora_adapter", {"lora_name": "late"})
    assert gone.status_code == 200
    assert server.post("/v1/chat/completions", chat_body(model="late")).status_code == 404
    again = {"lora_name": "late", "lora_path": str(place / "allowed" / "2")}
    assert server.post("/v1/load_lora_adapter", again).status_code == 200
    changed, cached = ask(server, "late", cache_salt="late")
    assert changed != first and not cached
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "late"}).status_code == 200
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "late"}).status_code == 404


@pytest.mark.parametrize("name", ["test-model", "a b", "x" * 129])
def test_names_that_cannot_be_are_refused(server: RunningServer, name: str) -> None:
    answer = server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "1"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "lora_name"


@pytest.mark.parametrize("path", ["../elsewhere", "/", ".", "nowhere", "0/adapter_config.json"])
def test_paths_elsewhere_are_refused(server: RunningServer, path: str) -> None:
    answer = server.post("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": path})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "lora_path"
    assert "elsewhere" not in answer.text


def test_a_link_out_of_the_folder_is_refused(server: RunningServer, place: Path) -> None:
    link = place / "allowed" / "link"
    link.symlink_to(place / "elsewhere")
    answer = server.post("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": "link"})
    assert answer.status_code == 400 and "below" in answer.text


def test_a_damaged_adapter_is_named_and_others_go_on(server: RunningServer, place: Path) -> None:
    folder = place / "allowed" / "cut"
    folder.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        whole = (place / "allowed" / "0" / name).read_bytes()
        (folder / name).write_bytes(whole if name.endswith("json") else whole[:-100])
    running_on: list[tuple[str, int]] = []
    other = threading.Thread(target=lambda: running_on.append(ask(server, "tuned")))
    other.start()
    answer = server.post("/v1/load_lora_adapter", {"lora_name": "cut", "lora_path": "cut"})
    other.join()
    assert answer.status_code == 400 and "not a readable safetensors file" in answer.text
    assert len(running_on) == 1


def test_without_the_options_nothing_changes(place: Path) -> None:
    config = EngineConfig(device="cpu", dtype="float32", block_size=16, cache_memory="16MiB")
    engine = Engine.from_checkpoint(str(place / "model"), config)
    with running(engine) as server:
        answer = server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "1"})
        assert answer.status_code == 400 and "--allow-runtime-lora" in answer.text
    with pytest.raises(ConfigError, match="together only"):
        ServerConfig(allow_runtime_lora=True)


def test_affinity_keys_know_adapters() -> None:
    scope = {"path": "/v1/chat/completions"}
    bodies = [chat_body("A long text. " * 400, model=name) for name in ("m", "tuned", "other")]
    raw = [json.dumps(each).encode() for each in bodies]
    plain, tuned, other = [
        asyncio.run(keys_of(scope, each, "m", frozenset({"tuned"}))) for each in raw
    ]
    assert plain and plain == other and not set(plain) & set(tuned)
