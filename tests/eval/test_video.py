"""Questions about videos, asked of the built-in models with and without caching."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from vlm_serve import EngineConfig, Pipeline
from vlm_serve.cli import main
from vlm_serve.eval.command import run_part
from vlm_serve.eval.replies import AnswerOptions
from vlm_serve.eval.video import VideoItem, judged, read_videos, video_parts

EXAMPLES = Path(__file__).parents[2] / "examples"
CLIP = EXAMPLES / "media" / "change.mp4"
START = "What color is the circle at the start?"


@pytest.mark.parametrize("model", ["demo", "demo-moe"])
def test_answers_are_the_same_with_and_without_caching(evaluated: Any, model: str) -> None:
    data = EXAMPLES / "eval" / "videos.csv"
    status, report, page = evaluated("video", model, "--data", str(data), "--max-tokens", "16")
    assert (status, report["items"], report["equal"]) == (0, 24, 24)
    assert [part["name"] for part in report["parts"]] == ["video QA, greedy", "video QA, seeded"]
    for part in report["parts"]:
        cached, uncached = part["with_caching"], part["without_caching"]
        assert (uncached["cached_tokens"], uncached["hit_rate"]) == (0, 0.0)
        assert cached["hit_rate"] > 0.5
        assert cached["computed_tokens"] < uncached["computed_tokens"] / 2
        rates = [each["hit_rate"] for each in part["answers"]]
        assert [rate > 0 for rate in rates] == [False, True, True, True] * 3
    assert report["parts"][0]["accuracy"]["all"]["right"] >= 6, "it was trained on such scenes"
    assert "sha256" in report["data"]
    assert "say nothing about accuracy" in page.words


def test_questions_of_a_video_are_asked_beside_each_other(tmp_path: Path) -> None:
    other = tmp_path / "other.mp4"
    shutil.copy(EXAMPLES / "eval" / "clip-1.mp4", other)
    items = [
        VideoItem("one", CLIP, START, "Red"),
        VideoItem("two", other, "What is the first object?", "A black square."),
        VideoItem("three", CLIP, "What color is the circle at the end?", "green"),
        VideoItem("four", CLIP, START, "b", ("blue", "red")),
        VideoItem("five", CLIP, START, "B", ("blue", "red")),
    ]
    (part,) = video_parts(items, AnswerOptions(decoding=("greedy",), max_tokens=12))
    with Pipeline("demo", EngineConfig(cache_memory="64MiB")) as pipe:
        one_by_one = {reply.item: reply for reply in run_part(pipe, part).replies}
        together = {reply.item: reply for reply in run_part(pipe, part, concurrency=2).replies}
    assert list(one_by_one) == ["one", "three", "four", "five", "two"]
    assert one_by_one["one"].answers == together["one"].answers
    assert one_by_one["one"].right is True, "case and full stop aside"
    assert one_by_one["three"].right is False
    assert one_by_one["one"].tokens.cached == 0 < one_by_one["three"].tokens.cached
    assert one_by_one["four"].answers[0].text == one_by_one["five"].answers[0].text


def test_an_answer_is_judged_without_its_thought() -> None:
    items = [VideoItem("one", CLIP, START, "Red")]
    (part,) = video_parts(items, AnswerOptions(decoding=("greedy",), max_tokens=60))
    given: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    with Pipeline("demo", EngineConfig(cache_memory="64MiB", threads=1, **given)) as pipe:
        (reply,) = run_part(pipe, part).replies
        whole = pipe.engine.preprocessor.tokenizer.decode(reply.answers[0].token_ids)
    (answer,) = reply.answers
    assert answer.reasoning and answer.reasoning in whole and "</think>" in whole
    assert reply.chosen == answer.text and "</think>" not in answer.text + answer.reasoning
    assert reply.right is True


@pytest.mark.parametrize(
    ("text", "right"), [("B", True), ("(B) red", True), ("red.", True), ("A", False), ("a", False)]
)
def test_choices_are_taken_by_letter_or_text(text: str, right: bool) -> None:
    for answer in ("B", "red"):
        item = VideoItem("one", CLIP, START, answer, ("blue", "red"))
        assert judged(item, text)[1] is right


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("in.csv", "", "there are no questions"),
        ("in.csv", "video,question,answer\n", "there are no questions"),
        ("in.csv", "video,question\nclip.mp4,What?\n", "line 2: it needs a text for answer"),
        ("in.csv", "clip,question,answer\nclip.mp4,What?,x\n", "line 2: it needs a text for video"),
        (
            "in.csv",
            "video,question,answer\nclip.mp4,What?,x\nno.mp4,a,b\n",
            "line 3: there is no v",
        ),
        (
            "in.csv",
            "video,question,answer,choices\nclip.mp4,a,x,y|z\n",
            "line 2: answer must be one",
        ),
        ("in.jsonl", "\n{", "line 2: it is not a JSON object"),
        (
            "in.jsonl",
            '{"video": "clip.mp4", "question": 1, "answer": "x"}',
            "line 1: it needs a te",
        ),
        (
            "in.jsonl",
            '{"video": "clip.mp4", "question": "a", "answer": "x", "choices": "x"}',
            "line 1: choices must be a list of texts",
        ),
        ("in.jsonl", b"\xff", "line 1: it is not a JSON object"),
        ("in.csv", b"\xff", "it is not UTF-8 text"),
        ("in.csv", None, "No such file"),
        ("in.txt", "", "data must be a .csv or a .jsonl file"),
    ],
)
def test_bad_files_are_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str | bytes | None,
    said: str,
) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"")
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert main(["eval", "video", "--data", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert path.suffix == ".txt" or str(path) in line


def test_choices_and_ids_are_read_in_both_forms(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(b"")
    table, lines = tmp_path / "in.csv", tmp_path / "in.jsonl"
    table.write_text("id,video,question,answer,choices\none,clip.mp4,Which?,red,blue | red\n")
    row = {
        **{"id": "one", "video": "clip.mp4", "question": "Which?", "answer": "red"},
        "choices": ["blue", "red"],
    }
    lines.write_text(json.dumps(row))
    expected = VideoItem("one", tmp_path / "clip.mp4", "Which?", "red", ("blue", "red"))
    assert read_videos(table) == read_videos(lines) == [expected]


def test_a_video_that_cannot_be_decoded_fails_the_run(
    tmp_path: Path, evaluated: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(CLIP, tmp_path / "good.mp4")
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    data = tmp_path / "in.csv"
    data.write_text("video,question,answer\ngood.mp4,Who drew this?,\u00e9\nbroken.mp4,Who?,me\n")
    command = ("video", "--data", str(data), "--decoding", "greedy", "--max-tokens", "4")
    status, report, page = evaluated(*command)
    assert status == 3
    assert (report["equal"], report["failed"], report["different"]) == (1, 1, 0)
    (part,) = report["parts"]
    assert [each["side"] for each in part["failures"]] == ["with caching", "without"]
    assert "1 of 2 could not be answered on both" in page.words
    assert "line 3, without: " in capsys.readouterr().err
