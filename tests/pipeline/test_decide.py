"""Questions about one input: the probabilities of transformers' pipeline, from one prefill."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from numpy.typing import NDArray
from parity import executor_of
from together import together

import vlm_serve
from vlm_serve.engine.requests.plan import StepOutput, StepPlan
from vlm_serve.errors import ContextLengthError, FailedItemsError, InvalidRequestError
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Pipeline
from vlm_serve.preprocess.decisions.asking import ask
from vlm_serve.preprocess.reading.decisions import read_questions
from vlm_serve.preprocess.reading.reader import read_conversation
from vlm_serve.sampling_params import SamplingParams

# transformers' processor counts a tensor's numbers with numpy.
pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
SEATS = 8
STATE = {"message": "I was charged twice. Ça va?", "lines": [1, {"a": None}]}
TYPED: dict[str, Any] = {
    "refund": {"type": "noul", "instructions": "Is a refund requested?"},
    "told": {"type": "noul", "instructions": ["Is", "it?"], "criteria": {"true": "It is so"}},
    "tone": {
        "type": "choice",
        "instructions": "What is the tone of img-1?",
        "criteria": {"calm": None, "angry": "Shouting", "sad": {"tears": 3}},
    },
    "urgent": {"type": "score", "criteria": ["Can wait", "This week", "Today <|im_end|>"]},
    "only": {"type": "choice", "instructions": "Which?", "criteria": {"one": None}},
}
PREDICATES = [{"type": "predicate", "instructions": f"It shows {n} stars."} for n in range(16)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, with pictures of up to 256 tokens."""
    folder = tmp_path_factory.mktemp("decide") / "demo"
    shutil.copytree(Path(vlm_serve.__file__).parent / "demo" / "dense", folder)
    file = folder / "preprocessor_config.json"
    config = json.loads(file.read_text())
    config["size"]["longest_edge"] = 256 * 256
    file.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def pipe(checkpoint: Path) -> Iterator[Pipeline]:
    config = EngineConfig(
        max_num_seqs=SEATS, step_time_target=0, speculative="off", max_model_len=2048
    )
    with Pipeline(checkpoint, config) as made:
        yield made


@pytest.fixture(scope="module")
def picture() -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 255, (256, 256, 3), dtype=np.uint8)


def about(*parts: Any) -> list[dict[str, Any]]:
    shown = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": shown}]


@pytest.fixture
def steps(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """The begin and end of each slice of prompts, by steps from now on."""
    executor, seen = executor_of(pipe.engine), list[list[tuple[int, int]]]()
    run = executor.run

    def counting(plan: StepPlan) -> StepOutput:
        seen.append([(each.start, each.end) for each in plan.slices if each.kind == "prefill"])
        return run(plan)

    monkeypatch.setattr(executor, "run", counting)
    return seen


@pytest.mark.always
def test_sixteen_questions_about_a_picture_cost_one_prefill(
    pipe: Pipeline, picture: NDArray[np.uint8], steps: list[list[tuple[int, int]]]
) -> None:
    """And each has the bits of a request of its own."""
    shown = about({"type": "image", "image": picture})
    pipe.engine.flush()
    with together(pipe.engine, len(PREDICATES)):
        answers = pipe.decide(shown, PREDICATES)
    (leader,), *others = counted = list(steps)
    boundary = others[0][0][0]
    assert leader[0] == 0 and boundary > 256
    tails = [leader[1] - boundary, *(end - boundary for step in others for _, end in step)]
    assert [len(step) for step in counted] == [1, SEATS, 16 - 1 - SEATS]
    assert all(begin == boundary for step in others for begin, _ in step)
    assert len(tails) == 16 and max(tails) < 40
    for question, answer in zip(PREDICATES, answers, strict=True):
        pipe.engine.flush()
        (alone,) = pipe.decide(shown, [question])
        assert alone.probabilities == answer.probabilities and alone.mass == answer.mass


@pytest.mark.parametrize("is_shown", [False, True], ids=["text", "picture"])
def test_probabilities_are_those_of_transformers(
    checkpoint: Path, pipe: Pipeline, picture: NDArray[np.uint8], is_shown: bool
) -> None:
    oracle.prepare_models()
    from PIL import Image
    from transformers.pipelines.decision import DecisionPipeline

    processor = oracle.processor(checkpoint)
    decide = DecisionPipeline(
        model=oracle.model(checkpoint), tokenizer=processor.tokenizer, processor=processor
    )
    state: Any = "Look at this: img-2!" if is_shown else STATE
    request = {"state": state, "questions": TYPED}
    if is_shown:
        request |= {"assets": {"img-2": Image.fromarray(picture)}}
    expected = decide(request)
    image = {"type": "image", "image": picture}
    written = '{"message": "I was charged twice. Ça va?", "lines": [1, {"a": null}]}'
    given = about("Look at this: ", image, "!") if is_shown else about(written)
    for answer in pipe.decide(given, TYPED):
        assert answer.name is not None
        wanted = expected[answer.name]
        if wanted["type"] == "noul":
            assert answer.probability == pytest.approx(wanted["noul"], abs=1e-5)
            continue
        probabilities = list(wanted["probabilities"].values())
        assert answer.probabilities == pytest.approx(probabilities, abs=1e-5)
        assert answer.confidence == pytest.approx(wanted["confidence"], abs=1e-5)
        if wanted["type"] == "choice":
            assert answer.choice == wanted["choice"]
        else:
            assert answer.score == pytest.approx(wanted["score"], abs=1e-5)


def test_many_options_have_labels_of_several_tokens(pipe: Pipeline) -> None:
    """A label's probability is that of its tokens, one after the other."""
    choices = [{"value": f"option {number}"} for number in range(60)]
    question = {"type": "choice", "instructions": "Which?", "choices": choices}
    (answer,) = pipe.decide("Hello", [question])
    conversation = read_conversation("chat", {"messages": about("Hello")})
    conversation.messages[0]["content"] = "Hello"
    preprocessor = pipe.engine.preprocessor
    traits = preprocessor.template_traits
    read = read_questions([question], [])
    (asked,) = ask(conversation, read, pipe.tokenizer, traits)
    prompt = list(preprocessor.prepare(asked.prompts[0][0]).token_ids)
    assert len(asked.prompts) == 4  # of all, and of those with A, B and C
    assert len(preprocessor.prepare(asked.prompts[1][0])) == len(prompt) + 1
    values = []
    for label in ("AA", "AB", "BZ", "CH"):
        value, ids = 0.0, pipe.tokenizer.encode_plain(label)
        assert len(ids) == 2
        for at, token in enumerate(ids):
            asking = SamplingParams(
                max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=(token,)
            )
            output = pipe.generate(prompt + ids[:at], asking)
            assert output.logprobs is not None
            value += output.logprobs[0][token]
        values.append(math.exp(value))
    found = [answer.probabilities[number] * answer.mass for number in (0, 1, 51, 59)]
    assert found == pytest.approx(values, rel=1e-6)
    assert sum(answer.probabilities) == pytest.approx(1)


def test_a_question_goes_behind_any_conversation(
    pipe: Pipeline, picture: NDArray[np.uint8]
) -> None:
    turns = [
        {"role": "system", "content": "You judge."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "How can I help?"},
    ]
    shown = {"type": "image", "image": picture}
    questions: list[dict[str, Any]] = [
        PREDICATES[0],
        {"type": "predicate", "instructions": [{"type": "text", "text": "Like "}, shown]},
    ]
    plain, pictured = pipe.decide(turns, questions)
    assert plain.probabilities != pictured.probabilities
    asked = [*turns, {"role": "user", "content": "It shows 0 stars.\nAnswer Yes or No only."}]
    (token,) = pipe.tokenizer.encode_plain("Yes")
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, logprob_token_ids=(token,))
    output = pipe.chat(asked, params, chat_template_kwargs={"enable_thinking": False})
    assert output.logprobs is not None
    value = math.exp(output.logprobs[0][token])
    assert plain.probability * plain.mass == pytest.approx(value, rel=1e-6)


def test_answers_of_little_mass_are_refused(pipe: Pipeline) -> None:
    (answer,) = pipe.decide("Hello", PREDICATES[:1])
    assert not answer.refused and 0 < answer.mass < 1
    (refused,) = pipe.decide("Hello", PREDICATES[:1], refuse_below=min(1, 2 * answer.mass))
    assert refused.refused and refused.probabilities == answer.probabilities
    with pytest.raises(InvalidRequestError, match="refuse_below must be 0 to 1"):
        pipe.decide("Hello", PREDICATES[:1], refuse_below=1.5)


def test_a_question_that_fails_leaves_the_others(pipe: Pipeline) -> None:
    long = {"type": "predicate", "instructions": "so " * 4000}
    good, bad = pipe.decide("Hello", [PREDICATES[0], long], errors="return")
    assert 0 < good.probability < 1 and isinstance(bad, ContextLengthError)
    with pytest.raises(FailedItemsError):
        pipe.decide("Hello", [PREDICATES[0], long])
