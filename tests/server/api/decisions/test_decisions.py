"""/v1/decisions with OpenAI's client, and /v1/systemone, over one engine."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import PIL.Image
import pytest
from openai.types import Decision
from serving import RunningServer, ok, running

from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.server.config import ServerConfig

SEATS = 4
QUESTIONS: list[dict[str, Any]] = [
    {"type": "predicate", "name": "star", "instructions": "There is a star."},
    {
        "type": "choice",
        "instructions": "Is it so?",
        "choices": [{"value": True}, {"value": "true"}, {"value": False, "description": "not"}],
    },
    {
        "type": "score",
        "name": "light",
        "instructions": [{"type": "input_text", "text": "How light is it?"}],
        "levels": [{"label": "dark"}, {"label": "grey"}, {"label": "light"}],
    },
    {
        "type": "choice",
        "instructions": "Which?",
        "choices": [{"value": f"option {number}"} for number in range(255)],
    },
]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[RunningServer, Pipeline]]:
    config = EngineConfig(max_num_seqs=SEATS, speculative="off", max_model_len=4096)
    with (
        Pipeline("demo", config) as pipe,
        running(
            pipe.engine, ServerConfig(port=0, idle_check=False, max_queued_requests=6)
        ) as server,
    ):
        yield server, pipe


@pytest.fixture(scope="module")
def url() -> str:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    PIL.Image.fromarray(noise).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def asked_about(url: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]


@pytest.mark.always
def test_openai_s_client_reads_the_answers(
    served: tuple[RunningServer, Pipeline], url: str
) -> None:
    server, pipe = served
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0)
    given: Any = asked_about(url)
    decision = client.decisions.create(model="test-model", input=given, questions=QUESTIONS)  # type: ignore[arg-type]
    Decision.model_validate(decision.model_dump(), strict=True)
    picture = [{"type": "image_url", "image_url": {"url": url}}]
    expected = pipe.decide([{"role": "user", "content": picture}], QUESTIONS)
    predicate, choice, score, many = decision.answers
    assert predicate.type == "predicate" and predicate.name == "star"
    assert predicate.probability == expected[0].probability
    assert choice.type == "choice" and choice.choice is expected[1].choice
    assert [each.value for each in choice.probabilities] == [True, "true", False]
    assert score.type == "score" and score.score == expected[2].score
    assert [(each.value, each.label) for each in score.probabilities] == [
        (0, "dark"),
        (1, "grey"),
        (2, "light"),
    ]
    assert score.confidence == expected[2].confidence
    assert many.type == "choice" and len(many.probabilities) == 255
    assert many.choice == expected[3].choice
    usage = decision.usage
    assert usage.output_tokens == 0 and usage.total_tokens == usage.input_tokens
    assert usage.input_tokens_details.cached_tokens > 0


def test_more_questions_than_the_queue_has_places(served: tuple[RunningServer, Pipeline]) -> None:
    """A request leaves places for others."""
    server, _ = served
    questions = [{"type": "predicate", "instructions": f"It is {n}."} for n in range(40)]
    body = {"input": "A number.", "questions": questions, "cache_report": True}
    answer = ok(server.post("/v1/decisions", body))
    assert len(answer["answers"]) == len(answer["cache_report"]) == 40
    (alone,) = ok(server.post("/v1/decisions", {**body, "questions": questions[7:8]}))["answers"]
    assert alone == answer["answers"][7]


def test_a_refusal_leaves_the_other_answers(served: tuple[RunningServer, Pipeline]) -> None:
    server, pipe = served
    masses = [answer.mass for answer in pipe.decide("Hello", QUESTIONS[:3])]
    body = {"input": "Hello", "questions": QUESTIONS[:3], "refuse_below": max(masses)}
    answers = ok(server.post("/v1/decisions", body))["answers"]
    kinds = [answer["type"] for answer in answers]
    assert kinds.count("refusal") == 2 and kinds[masses.index(max(masses))] != "refusal"
    named = answers[0] if kinds[0] == "refusal" else answers[2]
    assert named == {"name": "star" if kinds[0] == "refusal" else "light", "type": "refusal"}


def test_system_one_has_the_answers_of_decisions(
    served: tuple[RunningServer, Pipeline], url: str
) -> None:
    server, pipe = served
    questions = {
        "billing": {"type": "noul", "instructions": "Is this about billing?"},
        "tone": {"type": "choice", "criteria": {"calm": None, "angry": "as in img-1"}},
        "urgent": {"type": "score", "criteria": ["can wait", {"by": "today"}]},
    }
    asset = {"type": "image", "format": "png", "data_base64": url.partition(",")[2]}
    body = {"model": "test-model", "state": "Charged twice.", "questions": questions}
    answer = ok(server.post("/v1/systemone", body | {"assets": {"img-1": asset}}))
    billing, tone, urgent = (answer["answers"][name] for name in questions)
    expected = pipe.decide("Charged twice.", questions)
    assert billing == {"type": "noul", "noul": expected[0].probability}
    assert tone["type"] == "choice" and list(tone["probabilities"]) == ["calm", "angry"]
    assert list(tone["probabilities"].values()) != list(expected[1].probabilities)
    assert urgent == {
        "type": "score",
        "score": expected[2].score,
        "legend": {"0": "can wait", "1": {"by": "today"}},
        "confidence": expected[2].confidence,
        "probabilities": dict(zip("01", expected[2].probabilities, strict=True)),
    }
    assert answer["usage"]["output_tokens"] == 0 < answer["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/decisions", {"questions": QUESTIONS}, "input"),
        ("/v1/decisions", {"input": "x", "questions": []}, "questions"),
        ("/v1/decisions", {"input": "x", "questions": [{"type": "x"}]}, "questions[0].type"),
        ("/v1/decisions", {"input": "so " * 9000, "questions": QUESTIONS[:1]}, "input"),
        (
            "/v1/decisions",
            {"input": "x", "questions": QUESTIONS, "refuse_below": 2},
            "refuse_below",
        ),
        ("/v1/decisions", {"input": "x", "questions": QUESTIONS, "stream": True}, "stream"),
        (
            "/v1/decisions",
            {"input": "x", "questions": [{"type": "predicate", "instructions": [{}]}]},
            "questions[0].instructions.type",
        ),
        ("/v1/systemone", {"questions": {"q": {"type": "noul"}}}, "state"),
        ("/v1/systemone", {"state": "x", "questions": {}}, "questions"),
    ],
)
def test_bad_requests_are_named(
    served: tuple[RunningServer, Pipeline], path: str, body: dict[str, Any], param: str
) -> None:
    answer = served[0].post(path, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


BREAK = {"prompt_cache_breakpoint": {"mode": "explicit"}}


def test_what_has_no_effect_is_named(served: tuple[RunningServer, Pipeline]) -> None:
    """Name marks in questions too, whose prompts nobody continues."""
    part = {"type": "input_text", "text": "It rains.", **BREAK}
    body = {
        "input": "Rain",
        "questions": [{"type": "predicate", "instructions": [part]}],
        "safety_identifier": "me",
        "prompt_cache_options": {"prewarm": True},
    }
    answer = served[0].post("/v1/decisions", body)
    ok(answer)
    named = answer.headers["x-vlm-serve-ignored-fields"].split(", ")
    place = "questions[0].instructions[0].prompt_cache_breakpoint"
    assert sorted(named) == ["prompt_cache_options.prewarm", place, "safety_identifier"]


def test_a_marked_picture_in_a_question_is_read(
    served: tuple[RunningServer, Pipeline], url: str
) -> None:
    part = {"type": "input_image", "image_url": url}
    answers = []
    for each in (part, part | BREAK):
        question = {"type": "predicate", "instructions": [each]}
        body = {"input": "Rain", "questions": [question]}
        answers.append(ok(served[0].post("/v1/decisions", body))["answers"])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("labels", [2, 255])
def test_a_mark_in_the_input_is_a_cut_point_of_each_prompt(
    served: tuple[RunningServer, Pipeline], url: str, labels: int
) -> None:
    server, _ = served
    text = {"type": "input_text", "text": f"Something that {labels} questions are asked about."}
    parts = [{"type": "input_image", "image_url": url}, text]
    choices = [{"value": str(number)} for number in range(labels)]
    question = {"type": "choice", "instructions": "Which?", "choices": choices}
    body: dict[str, Any] = {"questions": [question], "cache_report": True}
    asked = body | {"input": [{"role": "user", "content": [*parts[:1], text | BREAK]}]}
    marked = server.post("/v1/decisions", asked)
    assert "x-vlm-serve-ignored-fields" not in marked.headers
    positions = {tuple(m["position"] for m in each["marks"]) for each in ok(marked)["cache_report"]}
    ((position,),) = positions
    assert position % 16
    other = {"type": "predicate", "instructions": "It is dark."}
    body |= {"questions": [other], "input": [{"role": "user", "content": parts}]}
    (report,) = ok(server.post("/v1/decisions", body))["cache_report"]
    assert report["boundary"] == position
    with_options = asked | {"prompt_cache_options": {"ttl": "12h"}}
    for each in ok(server.post("/v1/decisions", with_options))["cache_report"]:
        assert {mark["seconds"] for mark in each["marks"]} == {43200}


def test_a_request_without_a_cache_has_no_report(served: tuple[RunningServer, Pipeline]) -> None:
    body = {
        "input": "It rains.",
        "questions": QUESTIONS[:1],
        "cache_report": True,
        "prompt_cache_options": {"mode": "explicit"},
    }
    for _ in range(2):
        answer = ok(served[0].post("/v1/decisions", body))
        assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 0
        assert "cache_report" not in answer
    options = {"mode": "none"}
    refused = served[0].post("/v1/decisions", body | {"prompt_cache_options": options})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt_cache_options.mode"
