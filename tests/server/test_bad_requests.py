"""What is refused, with which status, and that the refusal names the field."""

from __future__ import annotations

import gzip
import json
import resource
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from serving import RunningServer, chat_body, connect, running, wait_for

from vlm_serve.errors import (
    CheckpointError,
    ContextLengthError,
    EngineError,
    InvalidRequestError,
    MediaError,
    MediaFetchError,
    OverloadedError,
)
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig

JSON = {"Content-Type": "application/json"}


def check_error(response: Any, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [1]}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "10"}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options"),
        ({"cache_salt": "x" * 129}, "cache_salt"),
        ({"cache_salt": "tenant\n"}, "cache_salt"),
        ({"cache_salt": "a b"}, "cache_salt"),
        ({"request_id": "a b"}, "request_id"),
        ({"priority": 2**40}, "priority"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        *[
            (
                {
                    "tools": [{"type": "function", "function": {"name": "f"}}],
                    "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed},
                },
                "tool_choice",
            )
            for allowed in (
                None,
                {},
                {"mode": "auto", "tools": []},
                {"mode": "none", "tools": [{"type": "function", "function": {"name": "f"}}]},
                {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
                {"mode": "auto", "tools": [{"type": "function", "function": {"name": {}}}]},
                {"mode": "auto", "tools": [{"type": "mcp"}]},
                {"mode": "auto", "tools": [5]},
            )
        ],
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {str(token): 0 for token in range(1025)}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"bad_words": ["x" * 257]}, "bad_words"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"language": "a"}}, "structured_outputs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_bad_field_is_named(fake: RunningServer, fields: dict[str, Any], param: str) -> None:
    submitted = fake.engine.num_submitted
    error = check_error(fake.post("/v1/chat/completions", chat_body() | fields), 400, param)
    assert error["type"] == "invalid_request_error"
    assert fake.engine.num_submitted == submitted
    assert fake.chat().status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guided_json", {}),
        ("guided_regex", "a"),
        ("guided_choice", ["a"]),
        ("guided_grammar", "root ::= a"),
        ("guided_whitespace_pattern", " "),
        ("chat_template", "{{ 1 }}"),
        ("best_of", 2),
        ("best_of", True),
        ("modalities", ["audio"]),
    ],
)
def test_a_known_field_without_implementation_is_refused_by_name(
    fake: RunningServer, name: str, value: Any
) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    error = check_error(fake.chat(tools=tools, **{name: value}), 400, name)
    assert error["code"] == "unsupported_field"
    assert name in error["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {}),
        ("bad_words", []),
        ("response_format", {"type": "text"}),
        ("best_of", 1),
        ("modalities", ["text"]),
        ("skip_special_tokens", True),
    ],
)
def test_a_known_field_that_asks_for_nothing_is_fine(
    fake: RunningServer, name: str, value: Any
) -> None:
    response = fake.chat(**{name: value})
    assert response.status_code == 200
    assert "x-vlm-serve-ignored-fields" not in response.headers


def test_an_unknown_model_is_not_found(fake: RunningServer) -> None:
    error = check_error(fake.chat(model="gpt-5"), 404, "model")
    assert error["code"] == "model_not_found"
    assert "test-model" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"nope",
        b'"text"',
        b"\xff\xfe{}",
        b'{"messages": [], "temperature": NaN}',
        b'{"n": 1' + b"0" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
        b"[" + b"[]," * 2_100_000 + b"1]",
        b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}",
    ],
    ids=lambda body: repr(body[:30]),
)
def test_a_body_that_is_no_sane_json_is_refused(fake: RunningServer, body: bytes) -> None:
    check_error(fake.client.post("/v1/chat/completions", content=body, headers=JSON), 400)
    assert fake.chat().status_code == 200


def test_brackets_inside_strings_do_not_count_as_depth(fake: RunningServer) -> None:
    assert fake.chat('[{"' * 500 + "\\").status_code == 200
    assert fake.chat('\\\\"[[[' * 200).status_code == 200


def test_a_surrogate_pair_is_a_character(fake: RunningServer) -> None:
    body = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00"}]}'
    response = fake.client.post("/v1/chat/completions", content=body, headers=JSON)
    assert response.status_code == 200
    assert fake.engine.preprocessor.calls[-1]["messages"][0]["content"] == "\U0001f600"


ODD = [[], {}, ["text"], {"a": 1}, 5, True, None]


@pytest.mark.parametrize("odd", ODD, ids=str)
@pytest.mark.parametrize(
    ("path", "made"),
    [
        ("chat/completions", lambda odd: {"messages": [
            {"role": "user", "content": [{"type": odd, "text": "x"}]}]}),
        ("chat/completions", lambda odd: {"messages": [
            {"role": "assistant", "tool_calls": [{"type": odd, "function": odd}]}]}),
        ("responses", lambda odd: {"input": [{"role": "user", "content": [{"type": odd}]}]}),
        ("responses", lambda odd: {"input": [{"role": "assistant", "content": [{"type": odd}]}]}),
        ("responses", lambda odd: {"input": [{"type": odd or 1, "role": "user", "content": "x"}]}),
        ("responses", lambda odd: {"input": "x", "text": {"format": {"type": odd}}}),
        ("responses", lambda odd: {"input": "x", "tool_choice": {"type": odd}}),
        ("messages", lambda odd: {"messages": [
            {"role": "user", "content": [{"type": odd}]}], "max_tokens": 5}),
        ("messages", lambda odd: {"messages": [
            {"role": "assistant", "content": [{"type": odd}]}], "max_tokens": 5}),
        ("messages", lambda odd: {"messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": odd}}]}], "max_tokens": 5}),
        ("messages", lambda odd: {"messages": [{"role": "user", "content": "x"}],
                                  "tool_choice": {"type": odd}, "max_tokens": 5}),
        ("chat/completions", lambda odd: chat_body() | {"response_format": {"type": odd}}),
        ("chat/completions", lambda odd: chat_body() | {"tool_choice": {"type": odd}}),
    ],
)  # fmt: skip
def test_a_type_that_is_no_text_is_refused(
    fake: RunningServer, path: str, made: Callable[[Any], Any], odd: Any
) -> None:
    answer = fake.post(f"/v1/{path}", made(odd))
    assert answer.status_code == 400, answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", b'{"prompt": "SURROGATE"}'),
        ("/v1/completions", b'{"prompt": "SURROGATE"}'),
        ("/v1/completions", b'{"prompt": "x", "bad_words": ["SURROGATE"]}'),
        ("/v1/responses", b'{"input": "x", "metadata": {"a": "SURROGATE"}}'),
        ("/v1/responses", b'{"input": "x", "SURROGATE": "a"}'),
    ],
)
def test_half_a_character_is_replaced_where_it_is_escaped(
    fake: RunningServer, path: str, body: bytes
) -> None:
    """Clients cut texts between two, and send them again with every later turn."""
    content = body.replace(b"SURROGATE", b"\xed\xa0\x80")
    check_error(fake.client.post(path, content=content, headers=JSON), 400)
    told = []
    for half in (b"\\uD83d", b"\\udE00", b"\\ufffd"):
        content = body.replace(b"SURROGATE", half)
        response = fake.client.post(path, content=content, headers=JSON)
        told.append(response.status_code)
    assert told == [told[-1]] * 3, "as the sign for it would be"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (r"a\ud83d b", "a\ufffd b"),
        (r"\udE00", "\ufffd"),
        (r"\ud83d\ud83d\ude00\ud83d", "\ufffd\U0001f600\ufffd"),
        (r"\\ud83d\ud83d", "\\ud83d\ufffd"),
        (r"\\\ud83d \\\\ud83d", "\\\ufffd \\\\ud83d"),
        (r"\n\ud83d\"", '\n\ufffd"'),
    ],
)
def test_halves_are_replaced_in_texts_and_in_arguments(
    fake: RunningServer, text: str, read: str
) -> None:
    arguments = json.dumps('{"a": "' + text + '"}')
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "ARGUMENTS"}}
    answer = {"role": "assistant", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": ""}
    content = json.dumps({"messages": [{"role": "user", "content": "TEXT"}, answer, result]})
    content = content.replace("TEXT", text).replace('"ARGUMENTS"', arguments)
    response = fake.client.post("/v1/chat/completions", content=content, headers=JSON)
    assert response.status_code == 200, response.text
    user, answer, _ = fake.engine.preprocessor.calls[-1]["messages"]
    assert user["content"] == read
    assert answer["tool_calls"][0]["function"]["arguments"] == {"a": read}


def packed(value: Any) -> bytes:
    return gzip.compress(value if isinstance(value, bytes) else json.dumps(value).encode())


def test_a_body_may_be_packed_by_gzip(fake: RunningServer) -> None:
    headers = JSON | {"Content-Encoding": "gzip"}

    def ask(content: bytes, **more: str) -> httpx.Response:
        return fake.client.post("/v1/chat/completions", content=content, headers=headers | more)

    body = chat_body("hi " * 300_000)
    assert ask(packed(body)).status_code == 200
    assert fake.engine.preprocessor.calls[-1]["messages"] == body["messages"]
    whole = packed(chat_body())
    for broken in (whole[:-3], whole + b"x", whole + whole, b"{}", b"", whole[:20] + b"x" * 50):
        answer = ask(broken)
        assert answer.status_code == 400 and "gzip" in answer.json()["error"]["message"], broken
    for name in ("br", "zstd", "deflate", "gzip, gzip"):
        refused = ask(whole, **{"Content-Encoding": name})
        assert refused.status_code == 415 and repr(name) in refused.json()["error"]["message"]
    plain = ask(json.dumps(chat_body()).encode(), **{"Content-Encoding": "identity"})
    assert plain.status_code == 200
    wait_for(lambda: fake.service.admission.memory.held == 0)


def test_a_packed_body_is_bounded_while_it_is_unpacked(tokenizer: Tokenizer) -> None:
    """A bomb of a thousand times its size is neither held nor waited for."""
    config = ServerConfig(port=0, max_body_size="8MiB")
    with running(FakeEngine(tokenizer), config) as server:
        bomb = packed(b" " * (1 << 30))
        headers = JSON | {"Content-Encoding": "gzip"}
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(3):
            answer = server.client.post("/v1/chat/completions", content=bomb, headers=headers)
            assert answer.status_code == 413
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
        wait_for(lambda: server.service.admission.memory.held == 0)


def test_another_encoding_than_utf8_is_refused(fake: RunningServer) -> None:
    for name in ("utf-16", "utf-16-le", "utf-32"):
        content = json.dumps(chat_body()).encode(name)
        check_error(fake.client.post("/v1/chat/completions", content=content, headers=JSON), 400)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_only_json_is_read(fake: RunningServer, kind: str | None) -> None:
    headers = {} if kind is None else {"Content-Type": kind}
    response = fake.client.post("/v1/chat/completions", content=b"{}", headers=headers)
    check_error(response, 415)


def test_a_body_that_says_it_is_too_large_is_refused_unread(fake: RunningServer) -> None:
    with connect(fake, b"{}", length=fake.service.config.max_body_bytes + 1) as connection:
        answer = b""
        while b"body_too_large" not in answer:
            part = connection.recv(4096)
            assert part, answer
            answer += part
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_body_of_unknown_length_is_read_up_to_the_limit(tokenizer: Tokenizer) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"messages": [{"role": "user", "content": "'
        for _ in range(200):
            yield b"x" * 100
        yield b'"}]}'

    with running(FakeEngine(tokenizer), ServerConfig(port=0, max_body_size=10_000)) as server:
        response = server.client.post("/v1/chat/completions", content=chunks(), headers=JSON)
        check_error(response, 413)
        assert server.chat().status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/nowhere", 404),
        ("POST", "/v1/embedding", 404),
        ("GET", "/v1/models/other", 404),
        ("POST", "/v1/chat/completions/", 404),
        ("GET", "/health/", 404),
        ("GET", "/v1/models//", 404),
    ],
)
def test_unknown_routes_answer_in_the_same_form(
    fake: RunningServer, method: str, path: str, status: int
) -> None:
    for headers in ({}, {"Host": "elsewhere.example"}):
        answer = fake.client.request(method, path, headers=headers)
        check_error(answer, 403 if headers else status)
        # A redirect would lead to whatever name the client gave the server.
        assert "location" not in answer.headers


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidRequestError("bad", param="messages"), 400),
        (ContextLengthError("too long", param="messages", code="context_length_exceeded"), 400),
        (MediaError("broken image", param="messages[0]"), 400),
        (MediaFetchError("unreachable", param="messages[0]"), 422),
        (OverloadedError("full"), 503),
        (EngineError("the step failed"), 500),
        (CheckpointError("gone"), 500),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("where", ["prepare", "submit"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_error_has_its_status(
    fake: RunningServer, error: Any, status: int, where: str, stream: bool
) -> None:
    if where == "prepare":
        fake.engine.preprocessor.error = error
    else:
        fake.engine.submit_error = error
    response = fake.chat(stream=stream)
    found = check_error(response, status, error.param)
    assert found["message"] == error.message
    assert found["type"] == error.type
    assert ("retry-after" in response.headers) == (status == 503)


@pytest.mark.parametrize("stream", [False, True])
def test_an_unexpected_exception_shows_an_id_and_nothing_else(
    fake: RunningServer, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    fake.engine.preprocessor.error = RuntimeError("secret /etc/path")
    response = fake.chat(stream=stream)
    error = check_error(response, 500)
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in error["message"]
    assert "secret" in caplog.text
    assert response.headers["x-request-id"] in caplog.text


@pytest.mark.parametrize(
    "source",
    [
        "/etc/passwd",
        "../x.png",
        "C:\\x.png",
        "ftp://host/x.png",
        "javascript:alert(1)",
        "fileX://x",
        5,
        ["a"],
    ],
)
@pytest.mark.parametrize("kind", ["image", "image_url", "video", "video_url"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_clients_name_media_by_url_only(
    fake: RunningServer, source: Any, kind: str, wrapped: bool
) -> None:
    part = {"type": kind, kind: {"url": source} if wrapped else source}
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}
    error = check_error(fake.post("/v1/chat/completions", body), 400)
    assert error["param"] == f"messages[0].content[1].{kind}" + (".url" if wrapped else "")
    assert not fake.engine.preprocessor.calls


def test_urls_of_known_schemes_pass_on_to_where_they_are_fetched(fake: RunningServer) -> None:
    for url in ("data:image/png;base64,AA==", "HTTP://h/x", "https://h/x", "file:///x"):
        content = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}]
        body = {"messages": [{"role": "user", "content": content}]}
        assert fake.post("/v1/chat/completions", body).status_code == 200
        (medium,) = fake.engine.preprocessor.calls[-1]["media"]
        assert (medium.source, medium.options) == (url, {"detail": "low"})


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400 + ".0"])
def test_a_number_beyond_all_floats_is_refused_wherever_it_stands(
    fake: RunningServer, number: str
) -> None:
    tools = '[{"type": "function", "name": "f", "parameters": {"maximum": NUMBER}}]'
    for body in (f'{{"input": "x", "tools": {tools}}}', '{"input": "x", "text": {"a": NUMBER}}'):
        content = body.replace("NUMBER", number).encode()
        check_error(fake.client.post("/v1/responses", content=content, headers=JSON), 400)
    content = b'{"input": "1e999", "metadata": {"a": "1e999"}}'
    assert fake.client.post("/v1/responses", content=content, headers=JSON).status_code == 200
