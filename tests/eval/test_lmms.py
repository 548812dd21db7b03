"""`vlm-serve eval lmms` beside a stand-in for lmms-eval; the real one is asked in `server/lmms`."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from vlm_serve.cli import main
from vlm_serve.errors import EvaluationError
from vlm_serve.eval.lmms_samples import read_samples, with_log
from vlm_serve.eval.replies import Reply, TokenCounts, TurnAnswer

STAND_IN = shlex.join([sys.executable, str(Path(__file__).with_name("lmms_stand_in.py"))])


def command(task: str, *more: str) -> tuple[str, ...]:
    return ("lmms", "demo", "--tasks", task, "--through", "server", "--lmms-eval", STAND_IN, *more)


def test_a_server_is_asked_with_and_without_caching(evaluated: Any) -> None:
    status, report, page = evaluated(*command("fine"))
    assert (status, report["items"], report["equal"]) == (0, 2, 2)
    (part,) = report["parts"]
    cached, uncached = part["with_caching"], part["without_caching"]
    assert 0 < cached["cached_tokens"] < cached["prompt_tokens"] == uncached["prompt_tokens"]
    assert uncached["cached_tokens"] == 0
    assert part["accuracy"]["fine"] == {"right": 1, "of": 2}
    assert report["settings"]["tasks"] == "fine"
    assert "lmms-eval: demo" in page.words
    assert evaluated(*command("fine", "--limit", "1"))[1]["items"] == 1


def test_a_request_that_failed_fails_the_run(
    evaluated: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report, _ = evaluated(*command("failed"))
    assert (status, report["failed"], report["equal"]) == (3, 1, 1)
    assert "failed/1, without: [LMMS_EVAL_REQUEST_FAILED" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "more", "said"),
    [
        ("crash", (), "ended with status 1 and no answers: there is no such task"),
        ("silent", (), "ended with status 0 and no answers: an error that is only logged"),
        ("slow", ("--timeout", "1"), "took more than 1 seconds"),
        ("fine", ("--lmms-eval", "/nowhere/python"), "/nowhere/python: No such file"),
        ("fine", ("--lmms-eval", ""), "lmms-eval is not installed beside vlm-serve"),
    ],
)
def test_lmms_eval_that_fails_as_a_whole_is_quoted(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    task: str,
    more: tuple[str, ...],
    said: str,
) -> None:
    output = tmp_path / "report.html"
    arguments = (*command(task), "--cache-memory", "64MiB", "-o", str(output), *more)
    assert main(["eval", *arguments]) == 1
    assert said in capsys.readouterr().err
    assert not output.exists()


def sample(number: int, text: Any, **fields: Any) -> str:
    return json.dumps({"doc_id": number, "target": "yes", "filtered_resps": text, **fields}) + "\n"


def test_samples_are_read_by_task_and_number(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    counts = [{"input_tokens": 7, "output_tokens": 2}, None, {"input_tokens": 3}]
    (folder / "20260101_120000_samples_b_samples_c.jsonl").write_text(
        sample(10, "no", resps=[["No."]], acc=0) + sample(9, ["yes"], acc=1.0, token_counts=counts)
    )
    (folder / "20260101_120000_samples_a.jsonl").write_text(
        sample(0, "[LMMS_EVAL_BUDGET_EXCEEDED]") + sample(1, "yes", anls=0.5)
    )
    over, free, first, second = read_samples(tmp_path)
    assert (over.item, over.error) == ("a/0", "[LMMS_EVAL_BUDGET_EXCEEDED]")
    assert (free.item, free.right, free.expected) == ("a/1", None, "yes")
    assert (first.item, first.right, first.tokens) == (
        "b_samples_c/9",
        True,
        TokenCounts(10, 0, 2),
    )
    assert (second.answers, second.chosen) == ((TurnAnswer("No."),), "no")
    assert (second.right, second.groups) == (False, ("b_samples_c",))


def test_a_folder_without_samples_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="no answers"):
        read_samples(tmp_path)


def test_the_pipelines_log_is_added_to_samples(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    noted = [
        Reply("t/1", (TurnAnswer("Yes.", "stop", (5, 6)),), tokens=TokenCounts(9, 4, 2)),
        Reply("t/0", error="no video"),
    ]
    log.write_text("\n".join(json.dumps(asdict(reply)) for reply in noted))
    samples = [Reply("t/0", error="marked"), Reply("t/1", (TurnAnswer("Yes."),), right=True)]
    failed, answered = with_log(samples, log)
    assert (failed.error, failed.answers) == ("no video", ())
    assert answered == Reply("t/1", noted[0].answers, right=True, tokens=TokenCounts(9, 4, 2))
