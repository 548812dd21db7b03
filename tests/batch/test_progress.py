"""How far a run is: a line that is written over on a terminal, lines of a log elsewhere."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from vlm_serve.batch import progress
from vlm_serve.batch.progress import BAR_WIDTH, SOME_FAILED, Progress, percent, verdict


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """A time that only the test moves, seen by the module as `time`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress, "time", self)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def done(shown: Progress, count: int = 1, *, failed: bool = False, cached: int = 0) -> None:
    for _ in range(count):
        shown.add(failed=failed, prompt_tokens=100, cached_tokens=cached)


def test_a_terminal_has_one_line_that_is_written_over(clock: Clock) -> None:
    out = Terminal()
    shown = Progress(8, out=out)
    for _ in range(8):
        clock.now += 0.5
        done(shown, cached=75)
    shown.close()
    assert out.getvalue().count("\n") == 1 and out.getvalue().endswith("\n")
    lines = out.getvalue().strip().split("\r")
    assert len({len(line.rstrip("\n")) for line in lines[:-1]}) == 1, "no rest of a longer one"
    assert lines[0].startswith(f"[{'#' * (BAR_WIDTH // 8)}.")
    assert "1/8, 0 failed, 75.0 % cached" in lines[0], "one alone has no rate"
    assert "2/8, 0 failed, 2.00/s, 3 s left, 75.0 % cached" in lines[1]
    assert lines[-1].startswith(f"[{'#' * BAR_WIDTH}] 8/8") and "left" not in lines[-1]


def test_a_log_has_a_line_now_and_then_and_one_at_the_end(clock: Clock) -> None:
    out = io.StringIO()
    shown = Progress(100, out=out)
    for _ in range(25):
        clock.now += 1.0
        done(shown)
    shown.close()
    lines = out.getvalue().splitlines()
    assert [line.split("] ")[1].split(",")[0] for line in lines] == ["10/100", "20/100", "25/100"]
    assert "\r" not in out.getvalue()


def test_what_an_earlier_run_has_done_counts_but_not_for_the_speed(clock: Clock) -> None:
    out = io.StringIO()
    shown = Progress(10, done=4, failed=1, out=out)
    clock.now += 100.0  # The model is loaded.
    done(shown, failed=True)
    clock.now += 10.0
    done(shown)
    assert "5/10, 2 failed, 0.0 % cached\n" in out.getvalue()
    assert "6/10, 2 failed, 0.10/s, 40 s left" in out.getvalue()


def test_a_run_of_nothing_and_one_that_has_not_begun(clock: Clock) -> None:
    out = io.StringIO()
    Progress(0, out=out).close()
    Progress(3, out=out).close()
    empty, waiting = out.getvalue().splitlines()
    assert empty.endswith("0/0, 0 failed") and "/s" not in waiting
    assert "0/3" in waiting and "left" not in waiting


def test_percent() -> None:
    assert (percent(0, 0), percent(1, 3), percent(5, 5)) == ("0.0 %", "33.3 %", "100.0 %")


def test_the_verdict_names_failures_but_not_thousands(capsys: pytest.CaptureFixture[str]) -> None:
    assert verdict([], Path("out.jsonl")) == 0
    assert capsys.readouterr().err == ""
    assert verdict(["q1: refused"], Path("out.jsonl")) == SOME_FAILED
    assert capsys.readouterr().err == "1 failed; the reasons are in out.jsonl:\n  q1: refused\n"
    assert verdict([f"q{number}" for number in range(25)], Path("out.jsonl")) == SOME_FAILED
    lines = capsys.readouterr().err.splitlines()
    assert lines[20] == "  q19" and lines[21:] == ["  and 5 more"]
