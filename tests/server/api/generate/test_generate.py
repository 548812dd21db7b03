"""POST /inference/v1/generate: token ids in, token ids out."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from checkpoint_spec import CheckpointSpec
from make_checkpoint import make_checkpoint
from serving import RunningServer, running

from vlm_serve.engine.engine import Engine
from vlm_serve.errors import ContextLengthError
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

PATH = "/inference/v1/generate"
LAYERS, TOP_K = 4, 2
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
PROMPT = [5, 9, 200, 31, 77, 12, 240, 3, 8, 60, 14, 90, 33, 25, 41, 7, 19, 100]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A real mixture-of-experts model."""
    spec = CheckpointSpec(num_layers=LAYERS, num_experts=8, experts_per_token=TOP_K, vision_depth=0)
    path = make_checkpoint(tmp_path_factory.mktemp("moe"), spec)
    config = EngineConfig(dtype="float32", block_size=16, cache_memory="32MiB", max_model_len=512)
    with running(Engine.from_checkpoint(str(path), config), ServerConfig(port=0)) as made:
        yield made


def ask(server: RunningServer, tokens: Any = PROMPT, outer: Any = None, **sampling: Any) -> Any:
    return server.post(PATH, {"token_ids": tokens, "sampling_params": sampling} | (outer or {}))


def answer(server: RunningServer, outer: Any = None, **sampling: Any) -> dict[str, Any]:
    made = ask(server, outer=outer, **sampling)
    assert made.status_code == 200, made.text
    body: dict[str, Any] = made.json()
    return body


def test_tokens_as_completions_gives_them(moe: RunningServer) -> None:
    made = answer(moe, {"request_id": "mine", "model": "test-model"}, **GREEDY, logprobs=2)
    assert set(made) == {
        "request_id", "model", "created", "choices", "usage", "prompt_logprobs",
        "kv_transfer_params", "ec_transfer_params",
    }  # fmt: skip
    assert (made["request_id"], made["model"]) == ("mine", "test-model")
    (choice,) = made["choices"]
    body = {"prompt": PROMPT, "return_token_ids": True, "logprobs": 2, **GREEDY}
    plain = moe.post("/v1/completions", body).json()
    (expected,) = plain["choices"]
    assert choice["token_ids"] == expected["token_ids"]
    assert choice["finish_reason"] == "length"
    assert made["usage"]["total_tokens"] == plain["usage"]["total_tokens"] == len(PROMPT) + 6
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert [each["logprob"] for each in content] == expected["logprobs"]["token_logprobs"]
    for each in content:
        best, second = each["top_logprobs"]
        assert (best["token"], best["logprob"]) == (each["token"], each["logprob"])
        assert second["logprob"] <= best["logprob"]


def test_an_end_of_sequence_is_a_token(moe: RunningServer) -> None:
    eos = moe.service.engine.preprocessor.tokenizer.encode("<|im_end|>")
    made = answer(moe, max_tokens=5, allowed_token_ids=eos)
    assert made["choices"][0]["token_ids"] == eos
    assert made["choices"][0]["finish_reason"] == "stop"


def test_a_stream_adds_up_to_the_whole(moe: RunningServer) -> None:
    sampling = GREEDY | {"logprobs": 0, "return_routed_experts": True}
    whole = answer(moe, **sampling)["choices"][0]
    body = {"token_ids": PROMPT, "sampling_params": sampling, "request_id": "mine"}
    chunks = moe.stream(PATH, body)
    assert all(set(chunk) == {"request_id", "choices", "usage"} for chunk in chunks)
    assert {chunk["request_id"] for chunk in chunks} == {"mine"}
    assert {chunk["usage"] for chunk in chunks} == {None}
    parts = [chunk["choices"][0] for chunk in chunks]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    content = [each for part in parts for each in part["logprobs"]["content"]]
    assert content == whole["logprobs"]["content"]
    assert all([each["token"]] == [r["token"] for r in each["top_logprobs"]] for each in content)
    before = [None] * (len(parts) - 1)  # tokens of one step share a chunk
    assert [part["finish_reason"] for part in parts] == [*before, "length"]
    assert [part["routed_experts"] for part in parts] == [*before, whole["routed_experts"]]


def test_usage_in_a_stream(moe: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"token_ids": PROMPT, "sampling_params": GREEDY, "stream_options": options}
    *chunks, last = moe.stream(PATH, body | {"cache_report": True})
    told = [len(chunk["choices"][0]["token_ids"]) for chunk in chunks]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [*accumulate(told)]
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == len(PROMPT) + 6
    assert last["cache_report"]["prompt_tokens"] == len(PROMPT)
    assert (
        "cache_report"
        in moe.stream(PATH, {"token_ids": PROMPT, "sampling_params": GREEDY, "cache_report": True})[
            -1
        ]
    )


def test_routed_experts(moe: RunningServer) -> None:
    sampling = GREEDY | {"return_routed_experts": True, "routed_experts_prompt_start": 4}
    (choice,) = answer(moe, **sampling)["choices"]
    file = io.BytesIO(base64.b64decode(choice["routed_experts"], validate=True))
    rows = np.load(file, allow_pickle=False)
    assert rows.shape == (len(PROMPT) + 6 - 1 - 4, LAYERS, TOP_K)


def test_prompt_logprobs(moe: RunningServer) -> None:
    made = answer(moe, **GREEDY, prompt_logprobs=1)
    rows = made["prompt_logprobs"]
    assert rows[0] is None
    assert len(rows) == len(PROMPT)
    for token, row in zip(PROMPT[1:], rows[1:], strict=True):
        assert set(row[str(token)]) == {"logprob", "rank", "decoded_token"}
        assert min(entry["rank"] for entry in row.values()) == 1


def test_prompt_logprobs_from_a_token_on(moe: RunningServer) -> None:
    whole = answer(moe, **GREEDY, prompt_logprobs=1)["prompt_logprobs"]
    rest = answer(moe, **GREEDY, prompt_logprobs=1, prompt_logprobs_start=3)["prompt_logprobs"]
    assert rest == [None] * 3 + whole[3:]


def test_several_choices_and_an_answer_that_goes_on(moe: RunningServer) -> None:
    made = answer(moe, {"cache_report": True}, **GREEDY, n=2)
    first, second = made["choices"]
    assert first["token_ids"] == second["token_ids"]
    assert made["cache_report"]["prompt_tokens"] == len(PROMPT)
    longer = [*PROMPT, *first["token_ids"], 50, 60]
    body = ask(moe, longer, {"cache_report": True}, **GREEDY).json()
    assert body["cache_report"]["boundary"] >= 16


def test_the_length_is_up_to_the_context(fake: RunningServer) -> None:
    """vLLM's own default of 16 is its Python class's, not the route's."""
    fake.engine.answer = "word " * 50
    made = answer(fake)
    assert made["choices"][0]["finish_reason"] == "stop"
    assert len(made["choices"][0]["token_ids"]) > 16


def test_what_means_nothing_for_tokens_is_named(fake: RunningServer) -> None:
    made = ask(
        fake,
        outer={"token_offsets": None, "features": None, "kv_transfer_params": None},
        detokenize=False,
        skip_special_tokens=False,
        output_kind=2,
        best_of=1,
        structured_outputs=None,
    )
    assert made.status_code == 200, made.text
    assert made.headers["x-vlm-serve-ignored-fields"] == ", ".join(
        [
            "token_offsets",
            *(
                f"sampling_params.{name}"
                for name in ("detokenize", "skip_special_tokens", "output_kind")
            ),
        ]
    )


@pytest.mark.parametrize(
    ("outer", "sampling", "param"),
    [
        ({"token_ids": []}, {}, "token_ids"),
        ({"token_ids": "hi"}, {}, "token_ids"),
        ({"token_ids": [-1]}, {}, "token_ids"),
        ({"token_ids": [10**9]}, {}, "token_ids"),
        ({"sampling_params": None}, {}, "sampling_params"),
        ({"features": {"mm_hashes": {"image": ["a"]}}}, {}, "features"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, {}, "kv_transfer_params"),
        ({"ec_transfer_params": {"x": 1}}, {}, "ec_transfer_params"),
        ({"stream_options": {"include_usage": True}}, {}, "stream_options"),
        ({"stream": True}, {"prompt_logprobs": 1}, "sampling_params.prompt_logprobs"),
        ({"cache_salt": "tenant:x"}, {}, "cache_salt"),
        ({}, {"max_tokens": 0}, "sampling_params.max_tokens"),
        ({}, {"temperature": -1}, "sampling_params.temperature"),
        ({}, {"logprobs": 21}, "sampling_params.logprobs"),
        ({}, {"n": "2"}, "sampling_params.n"),
        ({}, {"logit_bias": {"a": 1}}, "sampling_params.logit_bias"),
        ({}, {"structured_outputs": {"json": 5}}, "sampling_params.structured_outputs"),
        ({}, {"structured_outputs": {"whitespace_pattern": "x"}},
         "sampling_params.structured_outputs"),
        ({}, {"logprob_token_ids": [1]}, "sampling_params.logprob_token_ids"),
        ({}, {"best_of": 2}, "sampling_params.best_of"),
        ({}, {"extra_args": {"x": 1}}, "sampling_params.extra_args"),
        ({}, {"trace_decode_token_ids": [1]}, "sampling_params.trace_decode_token_ids"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(
    moe: RunningServer, outer: Any, sampling: Any, param: str
) -> None:
    made = ask(moe, outer=outer, **sampling)
    assert made.status_code == 400, made.text
    error = made.json()["error"]
    assert error["param"] in (param, param.split(".")[0])
    assert param.split(".")[-1] in error["message"].replace("token ids", "token_ids")


def test_errors_of_later_stages_name_the_fields_of_this_api(fake: RunningServer) -> None:
    assert ask(fake, outer={"model": "other"}).status_code == 404
    fake.engine.submit_error = ContextLengthError("too long", param="messages")
    assert ask(fake).json()["error"]["param"] == "token_ids"
