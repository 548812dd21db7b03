"""LongBench v2's questions, asked of the built-in models with and without caching."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sweeps import quick

from vlm_serve import EngineConfig, Pipeline, SamplingParams
from vlm_serve.cli import main
from vlm_serve.errors import ConfigError
from vlm_serve.eval.command import run_part
from vlm_serve.eval.longbench import (
    LongBenchOptions,
    chosen_letter,
    direct_prompt,
    longbench_parts,
    omitting_prompt,
    scoring_prompt,
)
from vlm_serve.eval.longbench_data import LongBenchItem, read_items
from vlm_serve.eval.replies import Reply

SAMPLE = Path(__file__).parents[2] / "examples" / "eval" / "longbench.json"
SHORT = ("--max-tokens", "6", "--reasoning-tokens", "12")


@pytest.fixture(scope="module")
def pipe() -> Iterator[Pipeline]:
    with Pipeline("demo", EngineConfig(cache_memory="64MiB", max_model_len=4096)) as opened:
        yield opened


@pytest.fixture(scope="module")
def items() -> list[LongBenchItem]:
    return read_items(SAMPLE)


def replies(pipe: Pipeline, items: list[LongBenchItem], **options: Any) -> tuple[Reply, ...]:
    (part,) = longbench_parts(items, LongBenchOptions(**options))
    return run_part(pipe, part).replies


@pytest.mark.parametrize("model", quick(["demo", "demo-moe"], 1))
def test_answers_are_the_same_with_and_without_caching(evaluated: Any, model: str) -> None:
    data = ("--data", str(SAMPLE), "--limit", "3")
    status, report, page = evaluated("longbench", model, *data, *SHORT)
    assert status == 0
    assert (report["items"], report["equal"]) == (15, 15)
    parts = {part["name"]: part for part in report["parts"]}
    kinds = ("greedy", "seeded")
    asked = [f"{name}, {kind}" for name in ("direct", "two-turn") for kind in kinds]
    assert list(parts) == [*asked, "scoring"]
    for name, part in parts.items():
        cached, uncached = part["with_caching"], part["without_caching"]
        assert uncached["cached_tokens"] == 0
        assert cached["prompt_tokens"] == uncached["prompt_tokens"] > 3000
        expected = {"direct": 0.0, "two-turn": 0.4, "scoring": 0.7}[name.split(",")[0]]
        assert cached["hit_rate"] >= expected
        if name.startswith("direct"):
            assert cached["cached_tokens"] == 0
            assert "only the template can be reused" in part["note"]
        assert set(part["accuracy"]) == {"all", "easy", "hard", "short", "medium", "long"}
    assert all(each["scores"] for each in parts["scoring"]["answers"])
    assert "All 15 answers are the same" in page.words
    assert "say nothing about accuracy" in page.words


def test_seeds_and_temperatures_count_and_are_repeated(
    pipe: Pipeline, items: list[LongBenchItem]
) -> None:
    def texts(**options: Any) -> list[str]:
        found = replies(pipe, items[:1], parts=("direct",), max_tokens=12, **options)
        return [answer.text for reply in found for answer in reply.answers]

    greedy = texts(decoding=("greedy",))
    warm = texts(decoding=("seeded",), temperature=3.0, seed=1)
    assert warm == texts(decoding=("seeded",), temperature=3.0, seed=1)
    assert warm != texts(decoding=("seeded",), temperature=3.0, seed=2)
    assert warm != greedy
    assert greedy == texts(decoding=("seeded",), temperature=0.0, seed=1)


def test_the_second_turn_as_published_has_no_document(
    pipe: Pipeline, items: list[LongBenchItem]
) -> None:
    tokens = {}
    for name in ("two-turn", "two-turn-omitting"):
        (reply,) = replies(
            pipe, items[:1], parts=(name,), decoding=("greedy",), max_tokens=4, reasoning_tokens=8
        )
        assert [answer.finish_reason for answer in reply.answers] != []
        assert len(reply.answers) == 2
        tokens[name] = reply.tokens
    assert tokens["two-turn"].hit_rate > 0.4
    assert tokens["two-turn-omitting"].hit_rate < 0.1
    assert tokens["two-turn-omitting"].prompt < tokens["two-turn"].prompt
    assert items[0].context not in omitting_prompt(items[0], "Salt.")


def test_a_first_turn_that_ends_in_its_thought_goes_on_from_it(
    items: list[LongBenchItem], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thought is the reasoning that was asked for; an empty answer would lose it."""
    asked: list[Any] = []
    chat = Pipeline.chat

    def noted(self: Pipeline, messages: Any, params: Any = None, **options: Any) -> Any:
        asked.append(messages)
        return chat(self, messages, params, **options)

    monkeypatch.setattr(Pipeline, "chat", noted)
    config = EngineConfig(
        cache_memory="64MiB",
        max_model_len=4096,
        threads=1,
        chat_template_kwargs={"enable_thinking": True},
    )
    how: dict[str, Any] = {"decoding": ("greedy",), "max_tokens": 60, "reasoning_tokens": 3}
    with Pipeline("demo", config) as thinking:
        (reply,) = replies(thinking, items[:1], parts=("two-turn",), **how)
        (omitting,) = replies(thinking, items[:1], parts=("two-turn-omitting",), **how)
    first, second = reply.answers
    assert first.text == "" and first.reasoning
    assert asked[1][1] == {"role": "assistant", "content": first.reasoning.strip()}
    assert second.reasoning and "think>" not in second.text + second.reasoning
    assert omitting.answers[0].reasoning.strip() in asked[3][0]["content"]


def test_scores_are_those_of_the_letters(pipe: Pipeline, items: list[LongBenchItem]) -> None:
    (reply,) = replies(pipe, items[:1], parts=("scoring",))
    encode = pipe.engine.preprocessor.tokenizer.encode_plain
    text = encode(scoring_prompt(items[0]))
    for letter, score in zip("ABCD", reply.scores, strict=True):
        ending = encode(f" {letter}")
        output = pipe.generate(
            [*text, *ending], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=3)
        )
        assert output.prompt_logprobs is not None
        rows = output.prompt_logprobs[-len(ending) :]
        assert score == tuple(row.logprobs[i] for row, i in zip(rows, ending, strict=True))
    sums = [sum(score) for score in reply.scores]
    assert reply.chosen == "ABCD"[sums.index(max(sums))]
    assert reply.right is (reply.chosen == items[0].answer)


def test_a_document_beyond_the_context_is_answered(
    pipe: Pipeline, items: list[LongBenchItem]
) -> None:
    long = next(item for item in items if item.length == "long")
    whole = pipe.engine.preprocessor.tokenizer.encode_plain(long.context)
    assert len(whole) > pipe.engine.max_model_len
    for name in ("direct", "two-turn", "scoring"):
        (reply,) = replies(
            pipe, [long], parts=(name,), decoding=("greedy",), max_tokens=4, reasoning_tokens=100
        )
        assert reply.error is None
        requests = {"direct": 1, "two-turn": 2, "scoring": 4}[name]
        each = reply.tokens.prompt / requests
        assert pipe.engine.max_model_len - 150 < each <= pipe.engine.max_model_len


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The correct answer is (B).", "B"),
        ("**The correct answer is C**", "C"),
        ("The correct answer is A. No: The correct answer is (D)", "D"),
        ("B", ""),
        ("The correct answer is (E)", ""),
    ],
)
def test_the_letter_of_an_answer(response: str, letter: str) -> None:
    assert chosen_letter(response) == letter


def test_prompts_strip_what_surrounds_their_parts(items: list[LongBenchItem]) -> None:
    prompt = direct_prompt(items[0])
    assert prompt.startswith("Please read the following text and answer the question below.\n\n<")
    assert f"(A) {items[0].choices[0]}\n(B) " in prompt
    assert prompt.endswith('"The correct answer is (insert answer here)".')


def row(**changes: Any) -> dict[str, Any]:
    first: dict[str, Any] = json.loads(SAMPLE.read_text(encoding="utf-8"))[0]
    return {name: value for name, value in (first | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "there are no questions"),
        ("[]", "there are no questions"),
        ("[\n1,\n}", "line 3: it is no valid JSON"),
        (json.dumps(row()) + "\n\n{", "line 3: it is no JSON object"),
        ("[1]", "question 1: it is no JSON object"),
        (json.dumps([row(context=None)]), "question 1: it needs a text for context"),
        (json.dumps(row(question=7, choice_B=None)), "line 1: it needs a text for question, choi"),
        (json.dumps(row(answer="E")), "line 1: answer must be A, B, C or D, got 'E'"),
        (json.dumps([row(), row()]), "question 2: the _id 'sample-1' appears twice"),
        (b"\xff\xfe", "it is no UTF-8 text"),
        (None, "No such file"),
    ],
)
def test_bad_files_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | bytes | None, said: str
) -> None:
    path = tmp_path / "data.json"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert main(["eval", "longbench", "--data", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vlm-serve: {path}")
    assert said in line


def test_json_lines_are_read_as_well(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    rows = [row(), row(_id="another", extra="ignored")]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    assert [item.id for item in read_items(path)] == ["sample-1", "another"]
    assert [item.id for item in read_items(path, 1)] == ["sample-1"]
    with pytest.raises(ConfigError, match="no questions"):
        read_items(path, 0)


def test_the_published_file_comes_from_the_hub(tmp_path: Path) -> None:
    """Out of the hub's cache, as huggingface_hub keeps it; without it the sentence says so."""
    code = "from vlm_serve.eval.longbench_data import find_data; print(find_data('hub'))"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}

    def run() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    missing = run()
    assert "ConfigError: data: THUDM/LongBench-v2 could not be fetched" in missing.stderr
    folder = tmp_path / "hub" / "datasets--THUDM--LongBench-v2"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    (snapshot / "data.json").write_bytes(SAMPLE.read_bytes())
    found = run()
    assert found.stdout.strip() == str(snapshot / "data.json"), found.stderr
