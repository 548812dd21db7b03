"""`vlm-serve run-batch` with the demo model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from vlm_serve.cli import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "batch" / "pictures.jsonl"
ENGINE = ("--cache-memory", "64MiB", "--max-num-seqs", "2", "--no-idle-check")
COMPLETIONS = "/v1/completions"


def request(
    custom_id: Any, body: Any, url: Any = COMPLETIONS, method: str = "POST"
) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


def prompt(text: str, tokens: int = 4, **fields: Any) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": tokens, "temperature": 0, **fields}


def write(path: Path, lines: list[Any]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def command(source: Path, output: Path, *options: str) -> list[str]:
    return ["run-batch", "-i", str(source), "-o", str(output), *ENGINE, *options]


def rows(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.read_text().splitlines()]


def text_of(row: dict[str, Any]) -> str:
    choice = row["response"]["body"]["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def test_the_shipped_example_is_answered(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    assert main(command(EXAMPLE, output, "--ordered")) == 0
    found = rows(output)
    asked = [json.loads(line)["custom_id"] for line in EXAMPLE.read_text().splitlines()]
    assert [row["custom_id"] for row in found] == asked
    for row in found:
        assert set(row) == {"id", "custom_id", "response", "error"}
        assert set(row["response"]) == {"status_code", "request_id", "body"}
        assert row["response"]["status_code"] == 200
        assert row["error"] is None
    assert [text_of(row) for row in found[:6]] == [
        "Three.",
        "A red star in the middle.",
        "A yellow heart in the middle.",
        "The star is red.",
        "The star is red.",
        "The heart is yellow.",
    ]
    details = [row["response"]["body"]["usage"]["prompt_tokens_details"] for row in found[:6]]
    by_picture = [
        details[index]["cached_tokens"] + details[index + 3]["cached_tokens"] for index in range(3)
    ]
    assert all(cached > 0 for cached in by_picture), "the second question found the picture"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]

    before = output.read_bytes()
    assert main(command(EXAMPLE, output, "--ordered")) == 0
    assert output.read_bytes() == before


def test_decisions_are_a_kind_of_line(tmp_path: Path) -> None:
    """Lines about one input run one after the other, and each but the first finds it."""
    about = "It was a bright cold day in April, and the clocks were striking. " * 8
    named = {"instructions": "Is it cold?", "type": "predicate"}
    lines = [
        request("open", {"input": about, "questions": [named]}, "/v1/decisions"),
        request("named", {"input": about, "questions": [named] * 3}, "/v1/decisions"),
        request("bad", {"input": about, "questions": []}, "/v1/decisions"),
        request(
            "system",
            {"state": about, "questions": {"cold": {**named, "type": "noul"}}},
            "/v1/systemone",
        ),
    ]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert main(command(source, output)) == 3
    found = {row["custom_id"]: row["response"] for row in rows(output)}
    assert {name: row["status_code"] for name, row in found.items()} == {
        "open": 200,
        "named": 200,
        "bad": 400,
        "system": 200,
    }
    (alone,) = found["open"]["body"]["answers"]
    assert found["named"]["body"]["answers"] == [alone] * 3
    assert found["system"]["body"]["answers"]["cold"]["noul"] == alone["probability"]
    cached = [
        row["body"]["usage"]["input_tokens_details"]["cached_tokens"]
        for row in found.values()
        if row["status_code"] == 200
    ]
    assert cached.count(0) == 1 and max(cached) > 100


def test_bad_lines_become_errors_and_the_others_are_answered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad: list[tuple[Any, str | None]] = [
        ("{", None),
        ("[1]", None),
        ("[" * 100, None),
        (request(5, prompt("a")), "custom_id"),
        (request("", prompt("a")), "custom_id"),
        (request("method", prompt("a"), method="GET"), "method"),
        (request("url", prompt("a"), url="http://host/v1/completions"), "url"),
        (request("query", prompt("a"), url="/v1/completions?x=1"), "url"),
        (request("no body", None), "body"),
        (request("stream", prompt("a", stream=True)), "stream"),
    ]
    refused = [
        (request("route", prompt("a"), url="/v1/nowhere"), 404),
        (request("model", prompt("a", model="other")), 404),
        (request("range", prompt("a", temperature=-1)), 400),
        (
            request(
                "file",
                {
                    "messages": [
                        {
                            "role": "user",
                            "content": [
                                {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
                            ],
                        }
                    ]
                },
                url="/v1/chat/completions",
            ),
            400,
        ),
    ]
    lines = [line for line, _ in bad] + ["", request("good", prompt("a"))]
    source = write(tmp_path / "in.jsonl", lines + [line for line, _ in refused])
    output = tmp_path / "out.jsonl"
    assert main(command(source, output, "--ordered", "--api-key", "secret")) == 3
    said = capsys.readouterr().err
    assert "14 failed; " in said and "line 6 (method): method must be" in said
    assert "line 14 (model): 404 the model 'other' does not exist" in said
    found = rows(output)
    assert len(found) == len(bad) + 1 + len(refused)
    for row, (_, param) in zip(found, bad, strict=False):
        assert row["response"] is None
        assert row["error"]["param"] == param
        assert row["error"]["message"].startswith("line ")
    assert found[len(bad)]["response"]["status_code"] == 200
    for row, (_, status) in zip(found[len(bad) + 1 :], refused, strict=True):
        assert row["response"]["status_code"] == status
        assert "error" in row["response"]["body"]


def test_failures_of_an_earlier_run_are_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [request("bad", prompt("a", temperature=-1)), request("good", prompt("b"))]
    source, output = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    files = ["--input-file", str(source), "--output-file", str(output)]  # as in vLLM
    for lines_in_it in (2, 3):
        assert main(["run-batch", *files, *ENGINE]) == 3
        said = capsys.readouterr().err
        assert f"{lines_in_it}/{lines_in_it}, 1 failed" in said
        assert "1 failed; " in said
        assert "line 1 (bad): 400 temperature must be at least 0" in said
        write(source, [*lines, request("new", prompt("c"))])
    assert len(rows(output)) == 3
    many = [request(str(n), prompt("a", n=0)) for n in range(25)]
    source, output = write(tmp_path / "many.jsonl", many), tmp_path / "many-out.jsonl"
    assert main(command(source, output)) == 3
    assert "  and 5 more\n" in capsys.readouterr().err


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    lines = [request(str(n), prompt(f"{n} red star {n % 3}", 64)) for n in range(30)]
    source = write(tmp_path / "in.jsonl", lines)
    whole, killed = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    assert main(command(source, whole)) == 0
    # One line after the other, so that there is time between the third and the last.
    slowly = command(source, killed, "--max-num-seqs", "1")
    process = subprocess.Popen(
        [sys.executable, "-m", "vlm_serve.cli", *slowly],
        stderr=subprocess.DEVNULL,
    )
    while not (killed.exists() and killed.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = killed.read_bytes()
    done = left.count(b"\n")
    assert done < len(lines), "it was killed too late to show anything"
    killed.write_bytes(left + b'{"id": "batch_re')
    assert main(command(source, killed)) == 0
    assert killed.read_bytes().startswith(left[: left.rindex(b"\n") + 1])
    answers = {row["custom_id"]: text_of(row) for row in rows(whole)}
    assert len(rows(killed)) == len(lines)
    assert {row["custom_id"]: text_of(row) for row in rows(killed)} == answers


def test_what_cannot_be_right_is_refused_before_a_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    twice = write(tmp_path / "twice.jsonl", [request("a", prompt("x")), request("a", prompt("y"))])
    assert main(command(twice, output)) == 2
    assert "lines 1 and 2 have the same custom_id 'a'" in capsys.readouterr().err
    assert not output.exists()

    source = write(tmp_path / "in.jsonl", [request("a", prompt("x"))])
    assert main(command(source, source)) == 2
    assert "same file" in capsys.readouterr().err
    write(output, [{"id": "batch_req_0"}])
    assert main(command(source, output)) == 2
    assert "answer no line" in capsys.readouterr().err
    assert main(command(tmp_path / "missing.jsonl", output)) == 2
    assert main(command(source, tmp_path / "no" / "out.jsonl")) == 2
