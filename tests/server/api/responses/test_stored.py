"""Stored responses, driven by openai-python with its strictest parsing."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fake_engine import FakeEngine
from hostile_files import image_of
from serving import RunningServer, running, wait_for
from tool_texts import CALL, CITY_TOOL

from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.reading import items
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.failover.attempt import Attempt, new_token

if TYPE_CHECKING:
    import openai


@pytest.fixture(autouse=True, scope="module")
def _client_library() -> None:
    """Import it when tests run: that takes a second, for which no collection waits."""
    global openai
    import openai


IMAGE = "data:image/png;base64,aGk="
PICTURE: Any = {
    "role": "user",
    "content": [
        {"type": "input_image", "image_url": IMAGE, "detail": "auto"},
        {"type": "input_text", "text": "What is it?"},
    ],
}
KEYS = "key-a: alice\nkey-b: bob\n"


def client_of(server: RunningServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key=key,
        max_retries=0,
        _strict_response_validation=True,
    )


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[RunningServer]:
    config = ServerConfig(port=0, response_store="1MiB")
    with running(FakeEngine(tokenizer), config) as server:
        yield server


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def ask(client: openai.OpenAI, given: Any = "hi", **fields: Any) -> Any:
    return client.responses.create(model="test-model", input=given, **fields)


def sent(server: RunningServer) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = server.engine.preprocessor.calls[-1]["messages"]
    return messages


def test_a_response_can_be_had_again(client: openai.OpenAI) -> None:
    first = ask(client, metadata={"run": "1"})
    assert first.store is True
    assert len(bytes.fromhex(first.id.removeprefix("resp_"))) == 16
    assert client.responses.retrieve(first.id) == first
    with client.responses.create(model="test-model", input="hi", stream=True) as stream:
        created, *_, last = list(stream)
    assert created.response.id == last.response.id  # type: ignore[union-attr]
    assert client.responses.retrieve(last.response.id) == last.response  # type: ignore[union-attr]
    cut = ask(client, max_output_tokens=2)
    assert client.responses.retrieve(cut.id).status == "incomplete"


def test_a_conversation_goes_on(server: RunningServer, client: openai.OpenAI) -> None:
    first = ask(client, [PICTURE], instructions="Be brief")
    second = ask(client, "Sure?", previous_response_id=first.id, instructions="Be long")
    assert second.previous_response_id == first.id
    third = ask(client, [{"role": "user", "content": "Why?"}], previous_response_id=second.id)
    continued = server.engine.preprocessor.calls[-1]
    resent = [
        PICTURE,
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"role": "user", "content": "Sure?"},
        *(item.model_dump(exclude_none=True) for item in second.output),
        {"role": "user", "content": "Why?"},
    ]
    ask(client, resent)
    again = server.engine.preprocessor.calls[-1]
    assert continued["messages"] == again["messages"]
    assert [part.source for part in continued["media"]] == [IMAGE]
    assert continued["media"][0].param == "previous_response_id[0].content[0].image_url"
    assert [message["role"] for message in continued["messages"]] == ["user", "assistant"] * 2 + [
        "user"
    ]
    assert third.usage is not None


def test_a_tools_answer_goes_to_its_call(server: RunningServer, client: openai.OpenAI) -> None:
    server.engine.answer = CALL
    tool: Any = {"type": "function", **CITY_TOOL["function"]}
    first = ask(client, tools=[tool])
    call = first.output[1]
    server.engine.answer = "Sunny."
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    second = ask(client, [output], previous_response_id=first.id, tools=[tool])
    assert second.output_text == "Sunny."
    user, assistant, result = sent(server)
    assert (user["role"], result["role"]) == ("user", "tool")
    assert assistant["tool_calls"][0]["id"] == call.call_id == result["tool_call_id"]
    kinds = [item.type for item in client.responses.input_items.list(second.id, order="asc")]
    assert kinds == ["message", "message", "function_call", "function_call_output"]


def test_a_call_that_was_cut_holds_up_no_conversation(
    server: RunningServer, client: openai.OpenAI
) -> None:
    """What the model had written of it is no call; with an output, it is one without arguments."""
    server.engine.answer = CALL
    tool: Any = {"type": "function", **CITY_TOOL["function"]}
    tokens = server.engine.preprocessor.tokenizer.encode_plain(CALL[: CALL.index("ris")])
    first = ask(client, tools=[tool], max_output_tokens=len(tokens))
    call = first.output[1]
    assert (call.status, call.arguments[-1:]) == ("incomplete", "a")
    server.engine.answer = "Once more."
    assert ask(client, "Go on", previous_response_id=first.id).output_text == "Once more."
    user, assistant, last = sent(server)
    assert (user["role"], assistant["role"], last["content"]) == ("user", "assistant", "Go on")
    assert assistant["content"].strip() == "Let me look."
    assert not assistant.get("tool_calls")
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "It was cut."}
    ask(client, [output], previous_response_id=first.id)
    assistant, result = sent(server)[1:]
    (made,) = assistant["tool_calls"]
    assert (made["id"], made["function"]["arguments"]) == (result["tool_call_id"], {})
    whole = call.model_dump() | {"status": "completed"}
    with pytest.raises(openai.BadRequestError, match="must be a JSON object"):
        ask(client, [{"role": "user", "content": "hi"}, whole])


def test_one_conversation_can_go_on_twice(server: RunningServer, client: openai.OpenAI) -> None:
    first = ask(client)
    for text in ("left", "right"):
        ask(client, text, previous_response_id=first.id)
        assert [message["content"] for message in sent(server)] == ["hi", "Hello, world!", text]


def test_a_turn_can_be_counted(server: RunningServer, client: openai.OpenAI) -> None:
    first = ask(client)
    options: Any = {"model": "test-model", "input": "more", "previous_response_id": first.id}
    counted = client.responses.input_tokens.count(**options)
    assert counted.input_tokens == client.responses.create(**options).usage.input_tokens
    assert counted.input_tokens > client.responses.input_tokens.count(input="more").input_tokens
    with pytest.raises(openai.NotFoundError):
        client.responses.input_tokens.count(previous_response_id="resp_1", input="more")


def test_a_deleted_response_is_gone(client: openai.OpenAI, server: RunningServer) -> None:
    first = ask(client)
    second = ask(client, "more", previous_response_id=first.id)
    client.responses.delete(first.id)
    for refused in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.delete(first.id),
        lambda: client.responses.input_items.list(first.id),
        lambda: ask(client, previous_response_id=first.id),
    ):
        with pytest.raises(openai.NotFoundError):
            refused()
    third = ask(client, "on", previous_response_id=second.id)
    assert len(sent(server)) == 5
    answer = server.client.delete(f"/v1/responses/{third.id}")
    assert answer.json() == {"id": third.id, "object": "response", "deleted": True}


def test_input_items_come_in_pages(client: openai.OpenAI) -> None:
    first = ask(client, [PICTURE, {"role": "developer", "content": "Be brief"}])
    second = ask(client, "Sure?", previous_response_id=first.id)
    items: Any = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.role for item in items] == ["user", "developer", "assistant", "user"]
    assert [item.content[0].type for item in items] == [
        "input_image", "input_text", "output_text", "input_text",
    ]  # fmt: skip
    assert items[0].content[0].image_url == IMAGE
    assert items[2].id == first.output[0].id
    assert len({item.id for item in items}) == 4
    page: Any = client.responses.input_items.list(second.id, limit=3)
    assert [item.id for item in page.data] == [item.id for item in items[:0:-1]]
    assert page.has_more
    assert [item.id for item in client.responses.input_items.list(second.id, limit=1)] == [
        item.id for item in reversed(items)
    ]
    for bad in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "none"}):
        with pytest.raises(openai.BadRequestError) as raised:
            client.responses.input_items.list(second.id, **bad)
        assert raised.value.param == next(iter(bad))


def test_who_does_not_want_it_stored(client: openai.OpenAI) -> None:
    response = ask(client, store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    stored = ask(client, store=True)
    more = ask(client, store=False, previous_response_id=stored.id)
    assert more.previous_response_id == stored.id


def test_nothing_is_stored_where_that_is_turned_off(tokenizer: Tokenizer) -> None:
    config = ServerConfig(port=0, idle_check=False, response_store=0)
    with running(FakeEngine(tokenizer), config) as server:
        answer = server.post("/v1/responses", {"input": "hi", "store": True, "user": "me"})
        assert answer.headers["x-vlm-serve-ignored-fields"] == "store, user"
        assert answer.json()["store"] is False
        plain = server.post("/v1/responses", {"input": "hi", "store": False})
        assert "x-vlm-serve-ignored-fields" not in plain.headers
        missing = server.client.get(f"/v1/responses/{answer.json()['id']}")
        assert missing.status_code == 404
        refused = server.post("/v1/responses", {"input": "hi", "previous_response_id": "resp_1"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "previous_response_id"
        assert "response-store" in refused.json()["error"]["message"]
        turns = [{"role": "user", "content": "hi"}, {"type": "item_reference", "id": "msg_1"}]
        refused = server.post("/v1/responses", {"input": turns})
        assert refused.status_code == 400
        assert "needs a server that runs with --response-store" in refused.text


USER: dict[str, Any] = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("more", [{}, {"include": ["message.output_text.logprobs"]}])
@pytest.mark.parametrize("stream", [False, True])
def test_the_default_server_stores_a_response_and_finds_its_items(
    fake: RunningServer, more: dict[str, Any], stream: bool
) -> None:
    """@ai-sdk/openai asks so; without keys an id of 128 random bits is the only secret."""
    body = {"input": [USER | {"id": "msg_mine"}], "stream": stream} | more
    if stream:
        events = fake.post("/v1/responses", body).text.split("\n\n")
        first = json.loads(events[-2].partition("data: ")[2])["response"]
    else:
        first = fake.post("/v1/responses", body).json()
    answer = first["output"][0]
    assert first["store"] is True
    for name in (first["id"], answer["id"]):
        assert re.fullmatch("[a-z]+_[0-9a-f]{32}", name)
    reference = {"type": "item_reference", "id": answer["id"]}
    second = fake.post("/v1/responses", {"input": [USER, reference, USER]})
    assert second.status_code == 200, second.text
    assert fake.engine.preprocessor.calls[-1]["messages"][1]["content"] == "Hello, world!"
    guessed = fake.post("/v1/responses", {"input": [USER, reference | {"id": "msg_mine"}]})
    assert guessed.status_code == 404, "its client has chosen that id"
    unstored = fake.post("/v1/responses", body | {"store": False, "stream": False}).json()
    assert unstored["store"] is False
    assert fake.client.get(f"/v1/responses/{unstored['id']}").status_code == 404


def test_ids_of_an_attempt_follow_from_its_secret() -> None:
    attempt = Attempt.first("mine")
    assert len(attempt.secret) == 16 and attempt.secret.hex() not in repr(attempt)
    again = replace(attempt, resumed=1)
    other = replace(attempt, secret=b"another")
    names = [new_token(each, "block", 0) for each in (attempt, again, other)]
    assert names[0] == names[1] != names[2] and len(names[0]) == 32


def test_what_failed_is_not_stored(server: RunningServer, client: openai.OpenAI) -> None:
    server.engine.fail_after = 1
    with client.responses.create(model="test-model", input="hi", stream=True) as stream:
        last: Any = list(stream)[-1]
    assert last.type == "response.failed"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(last.response.id)


def test_a_flush_forgets_them(server: RunningServer, client: openai.OpenAI) -> None:
    server.engine.flush = lambda: None
    response = ask(client)
    assert server.post("/v1/cache/flush", {}).status_code == 200
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_they_have_their_time(tokenizer: Tokenizer) -> None:
    config = ServerConfig(port=0, response_store="1MiB", response_store_ttl=0.05)
    with running(FakeEngine(tokenizer), config) as server:
        made = server.post("/v1/responses", {"input": "hi"}).json()["id"]
        wait_for(lambda: server.client.get(f"/v1/responses/{made}").status_code == 404)


def test_they_have_their_room(server: RunningServer, client: openai.OpenAI) -> None:
    def picture(size: int) -> Any:
        part = {"type": "input_image", "detail": "auto", "image_url": IMAGE + "A" * size}
        return [{"role": "user", "content": [part]}]

    first = ask(client, picture(400_000))
    second = ask(client, "and?", previous_response_id=first.id)  # holds the same picture
    third = ask(client, picture(400_000))
    for response in (first, second, third):
        assert client.responses.retrieve(response.id).id == response.id
    ask(client, picture(400_000))
    for response in (first, second):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)
    assert client.responses.retrieve(third.id).id == third.id
    assert server.service.state.responses is not None
    assert server.service.state.responses.num_bytes(b"") < 1 << 20
    assert ask(client, picture(1_100_000)).store is False
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, picture(1_100_000), store=True)
    assert raised.value.param == "store"
    with pytest.raises(openai.BadRequestError):  # with what it continues
        ask(client, picture(700_000), previous_response_id=third.id, store=True)


def test_nobody_sees_anothers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text(KEYS, encoding="utf-8")
    config = ServerConfig(
        port=0, response_store="1MiB", api_key=("one", "two"), tenant_keys=str(file)
    )
    salt = {"cache_salt": "s"}
    with running(FakeEngine(tokenizer), config) as server:
        with client_of(server, "key-a") as client:
            of_alice = ask(client).id
            assert client.responses.retrieve(of_alice).id == of_alice
        with client_of(server, "one") as client:
            plain, salted = ask(client).id, ask(client, extra_body=salt).id
            assert client.responses.retrieve(salted, extra_query=salt).id == salted
            assert ask(client, previous_response_id=salted, extra_body=salt).store
            for of_other in (salted, of_alice):
                with pytest.raises(openai.NotFoundError):
                    client.responses.retrieve(of_other)
                with pytest.raises(openai.NotFoundError):
                    ask(client, previous_response_id=of_other)
            with pytest.raises(openai.BadRequestError):
                client.responses.retrieve(of_alice, extra_query={"cache_salt": "tenant:alice"})
        known, unknown = [], "resp_" + "0" * 32
        for key in ("two", "key-b"):
            headers = {"Authorization": f"Bearer {key}"}
            for made in (plain, salted, of_alice, unknown):
                for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
                    url = f"/v1/responses/{made}{path}"
                    answer = server.client.request(method, url, headers=headers)
                    assert answer.status_code == 404
                    known.append(answer.text.replace(made, "X"))
        assert len(set(known)) == 1
        with client_of(server, "key-a") as client:
            assert client.responses.retrieve(of_alice, extra_query=salt).id == of_alice


def test_a_stored_response_is_told_as_a_stream(
    server: RunningServer, client: openai.OpenAI
) -> None:
    made = client.responses.create(model="test-model", input="hi")
    with client.responses.retrieve(made.id, stream=True) as stream:
        events: list[Any] = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created" and events[-1].type == "response.completed"
    assert events[-1].response.output == made.output
    told = "".join(event.delta for event in events if event.type.endswith("text.delta"))
    assert told == made.output_text
    with client.responses.retrieve(made.id, stream=True, starting_after=1) as stream:
        assert list(stream) == events[2:]
    for query in ("stream=5", "stream=true&starting_after=x"):
        assert server.client.get(f"/v1/responses/{made.id}?{query}").status_code in (400, 401)


def test_the_cache_knows_what_is_continued(checkpoint: Path) -> None:
    options = EngineConfig(
        device="cpu", block_size=16, cache_memory="48MiB", max_model_len=1024, threads=1
    )
    engine = Engine.from_checkpoint(str(checkpoint), options)
    data = base64.b64encode(image_of("PNG", 96, 64)).decode()
    picture = {
        "type": "input_image",
        "detail": "auto",
        "image_url": f"data:image/png;base64,{data}",
    }
    config = ServerConfig(port=0, response_store="1MiB")
    with running(engine, config) as server, client_of(server) as client:
        first = ask(client, [{"role": "user", "content": [picture]}], max_output_tokens=4)
        second = ask(client, "And?", previous_response_id=first.id, max_output_tokens=4)
    cached = second.usage.input_tokens_details.cached_tokens
    assert cached >= first.usage.input_tokens - 16
    assert second.usage.input_tokens > first.usage.total_tokens


def test_an_infinite_number_is_not_stored(server: RunningServer) -> None:
    content = b'{"input": [{"role": "user", "content": "hi", "x": [1e999]}]}'
    headers = {"content-type": "application/json"}
    answer = server.client.post("/v1/responses", content=content, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


def test_the_past_is_part_of_what_a_request_costs(
    server: RunningServer, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of few bytes that continues many is read and prepared where large ones are, and
    counts as one."""
    lanes: list[str] = []
    run = server.service.workers._run

    async def noted(name: str, work: Any) -> Any:
        lanes.append(name)
        return await run(name, work)

    monkeypatch.setattr(server.service.workers, "_run", noted)
    held: list[int] = []

    def read_past(past: list[Any], conversation: Any) -> None:
        held.append(server.service.admission.memory.held)
        read(past, conversation)

    read = items.read_past
    monkeypatch.setattr("vlm_serve.server.api.responses.route.read_past", read_past)
    first = ask(client, "short")
    assert lanes == ["prepare"] * len(lanes)
    ask(client, "short", previous_response_id=first.id)
    assert lanes == ["prepare"] * len(lanes)
    long = ask(client, "x" * 300_000)
    del lanes[:], held[:]
    ask(client, "short", previous_response_id=long.id)
    assert lanes[0] == "json" and "large" in lanes and "prepare" not in lanes
    assert held[0] > 300_000


def test_the_turn_that_fills_the_store_is_kept(
    server: RunningServer, client: openai.OpenAI
) -> None:
    """Its answer says so. What follows it says that it is not, or makes room."""
    responses = server.service.state.responses
    assert responses is not None
    large = ask(client, "x" * (responses.max_bytes - 3000))
    for _ in range(20):
        before, large = large, ask(client, "hi", previous_response_id=large.id)
        if not large.store:
            break
        assert client.responses.retrieve(large.id).id == large.id
    assert not large.store
    assert client.responses.retrieve(before.id).id == before.id
    again = ask(client, "short")
    assert again.store and client.responses.retrieve(again.id).id == again.id
