"""One answer, one score or one request that is not as it should be is found and fails the run."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from vlm_serve import EngineConfig, Output, Pipeline, SamplingParams
from vlm_serve.cli import main
from vlm_serve.engine.requests.outputs import PromptLogprobs
from vlm_serve.errors import EngineClosedError, EngineError
from vlm_serve.eval.command import report_on, run_sides
from vlm_serve.eval.longbench import LongBenchOptions, longbench_parts
from vlm_serve.eval.longbench_data import read_items
from vlm_serve.eval.replies import BenchmarkPart
from vlm_serve.eval.report import Subject

SAMPLE = Path(__file__).parents[2] / "examples" / "eval" / "longbench.json"
CONFIG = EngineConfig(cache_memory="64MiB")


class Faulty(Pipeline):
    """Answers as ever but for its second request, at which `fault` happens."""

    fault = ""
    asked = 0

    def chat(self, messages: Any, params: Any = None, **options: Any) -> Output:
        output = super().chat(messages, params, **options)
        self.asked += 1
        return self._changed(output) if self.asked == 2 else output

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **options: Any
    ) -> Output:
        output = super().generate(prompt, params, **options)
        self.asked += 1
        return self._changed(output) if self.asked == 2 else output

    def _changed(self, output: Output) -> Output:
        if self.fault == "error":
            raise EngineError("the step failed")
        if self.fault == "stop":
            raise EngineClosedError("the engine has stopped")
        if self.fault == "text":
            return dataclasses.replace(output, text=output.text + "<b>")
        if self.fault == "finish reason":
            return dataclasses.replace(output, finish_reason="abort")
        if self.fault == "tokens":
            return dataclasses.replace(output, token_ids=[*output.token_ids, 1])
        assert self.fault == "one bit"
        assert output.prompt_logprobs is not None
        first, *others = output.prompt_logprobs
        moved = {token: math.nextafter(value, 0.0) for token, value in first.logprobs.items()}
        return dataclasses.replace(
            output, prompt_logprobs=(PromptLogprobs(moved, first.rank), *others)
        )


def run(fault: str, part: str, output: Path, *, with_caching: bool = False) -> int:
    """The exit status of a run over three questions with a faulty side."""

    def open_side(caching: bool) -> AbstractContextManager[Pipeline]:
        pipe = Faulty("demo", dataclasses.replace(CONFIG, enable_prefix_caching=caching))
        pipe.fault = fault
        pipe.asked = 0 if caching is with_caching else 2
        return pipe

    options = LongBenchOptions(("greedy",), max_tokens=4, parts=(part,))
    parts: list[BenchmarkPart] = list(longbench_parts(read_items(SAMPLE, 3), options))
    subject = Subject("LongBench v2", "demo", SAMPLE, {"note": "<made> for & tests"})
    return report_on(subject, run_sides(open_side, parts), output)


@pytest.mark.parametrize(
    ("fault", "part", "item"),
    [
        ("text", "direct", "sample-2"),
        ("finish reason", "direct", "sample-2"),
        ("tokens", "direct", "sample-2"),
        ("one bit", "scoring", "sample-1"),
    ],
)
def test_what_differs_is_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, part: str, item: str
) -> None:
    output = tmp_path / "report.html"
    assert run(fault, part, output, with_caching=fault == "tokens") == 4
    report = json.loads(output.with_suffix(".json").read_text())
    assert (report["equal"], report["different"], report["failed"]) == (2, 1, 0)
    assert report["verdict"] == "1 of 3 answers differ between the two sides."
    (difference,) = report["parts"][0]["differences"]
    what = "score of B" if fault == "one bit" else fault
    assert (difference["item"], difference["what"]) == (item, what)
    assert difference["cached"] != difference["uncached"]
    said = capsys.readouterr()
    assert report["verdict"] in said.out
    assert f"{item}, {what}: " in said.err
    page = output.read_text()
    assert "What differs" in page
    assert "<b>" not in page, "texts of models and users are no markup"
    assert "&lt;made&gt; for &amp; tests" in page
    same = {each["item"]: each["same"] for each in report["parts"][0]["answers"]}
    assert [name for name, is_same in same.items() if not is_same] == [item]


@pytest.mark.parametrize("with_caching", [True, False])
def test_a_request_that_fails_is_listed(tmp_path: Path, with_caching: bool) -> None:
    output = tmp_path / "report.html"
    assert run("error", "direct", output, with_caching=with_caching) == 3
    report = json.loads(output.with_suffix(".json").read_text())
    assert (report["equal"], report["different"], report["failed"]) == (2, 0, 1)
    side = "with caching" if with_caching else "without"
    failure = {"side": side, "item": "sample-2", "error": "the step failed"}
    assert report["parts"][0]["failures"] == [failure]
    assert "What failed" in output.read_text()


def test_an_engine_that_stops_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(EngineClosedError):
        run("stop", "direct", tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--output", "report.txt"), "must end with .html"),
        (("--output", "nowhere/report.html"), "no such folder"),
        (("--temperature", "-1"), "temperature must be at least 0"),
        (("--max-tokens", "0"), "must be a whole number above 0"),
        (("--part", "cot"), "invalid choice: 'cot'"),
        (("--no-enable-prefix-caching",), "there is no --no-enable-prefix-caching"),
        (("--concurency", "2"), "did you mean --concurrency?"),
    ],
)
def test_bad_options_are_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        status = main(["eval", "longbench", "--data", str(SAMPLE), *arguments])
    except SystemExit as done:
        status = int(str(done.code))
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_side_that_is_switched_off_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLM_SERVE_ENABLE_PREFIX_CACHING", "false")
    output = str(tmp_path / "report.html")
    assert main(["eval", "longbench", "--data", str(SAMPLE), "-o", output]) == 2
    assert "enable_prefix_caching is what eval compares" in capsys.readouterr().err
