"""`vlm-serve video-qa` with the demo model."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from vlm_serve.batch.video_qa import _LATER
from vlm_serve.batch.video_questions import read_questions
from vlm_serve.cli import main
from vlm_serve.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"
ENGINE = ("--cache-memory", "64MiB", "--no-idle-check")


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_shipped_table_is_answered_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = EXAMPLES / "batch" / "videos.csv", tmp_path / "out.csv"
    command = ["video-qa", "-i", str(source), "-o", str(output), *ENGINE]
    assert main(command) == 0
    found = table(output)
    assert [row["answer"] for row in found] == ["Red.", "Blue.", "Sorry, I cannot tell."]
    assert sum(int(row["cached_tokens"]) > 0 for row in found) == 2
    assert "change.mp4  3 questions" in capsys.readouterr().err
    assert main([*command, "--question", "Who drew this?"]) == 0, "which has been answered"
    assert sorted(row["id"] for row in table(output)) == sorted(row["id"] for row in found)
    assert all(row in found for row in table(output))
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_a_folder_with_a_broken_video(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "videos"
    (folder / "sub").mkdir(parents=True)
    shutil.copy(EXAMPLES / "media" / "change.mp4", folder / "sub" / "a b%20.mp4")
    (folder / "broken.mp4").write_bytes(b"no video")
    (folder / "notes.txt").write_text("no video")
    output = tmp_path / "out.jsonl"
    command = ["video-qa", "-i", str(folder), "-o", str(output), *ENGINE]
    question = "What color is the circle at the start?"
    for _ in range(2):
        assert main([*command, "--question", question]) == 3
        said = capsys.readouterr().err
        assert "2/2, 1 failed" in said and f"  broken.mp4, '{question}': " in said
    rows = {row["video"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert set(rows) == {"sub/a b%20.mp4", "broken.mp4"}
    good, bad = rows["sub/a b%20.mp4"], rows["broken.mp4"]
    assert (good["answer"], good["error"]) == ("Red.", None)
    assert (good["finish_reason"], good["reasoning"]) == ("stop", None)
    assert bad["answer"] is bad["finish_reason"] is bad["reasoning"] is None
    assert bad["error"]
    assert str(tmp_path) not in bad["error"]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_thought_that_the_limit_cuts_is_told_from_an_answer(tmp_path: Path, suffix: str) -> None:
    source, output = tmp_path / "in.csv", tmp_path / f"out.{suffix}"
    video = EXAMPLES / "media" / "change.mp4"
    source.write_text(f"video,question\n{video},What color is the circle at the start?\n")
    command = ["video-qa", "-i", str(source), "-o", str(output), "--max-tokens", "4", *ENGINE]
    assert main([*command, "--chat-template-kwargs", '{"enable_thinking": true}']) == 0
    (row,) = table(output) if suffix == "csv" else [json.loads(output.read_text())]
    assert (row["answer"], row["finish_reason"]) == ("", "length")
    assert row["reasoning"].strip()
    assert main(command) == 0, "which has been answered"


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_choices_have_probabilities(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    """A run with other choices, or with none, does not go on from them."""
    source, output = EXAMPLES / "batch" / "videos.csv", tmp_path / f"out.{suffix}"
    command = ["video-qa", "-i", str(source), "-o", str(output), *ENGINE]
    choices = ["--choices", "red", "blue", "none of them"]
    assert main([*command, *choices]) == 0
    found = [json.loads(line) for line in output.read_text().splitlines() if suffix == "jsonl"]
    if suffix == "csv":
        found = [
            {**row, "probabilities": json.loads(row["probabilities"])} for row in table(output)
        ]
    assert len(found) == 3 and not any(row["error"] for row in found)
    for row in found:
        assert list(row["probabilities"]) == choices[1:]
        assert sum(row["probabilities"].values()) == pytest.approx(1)
        assert row["answer"] == max(row["probabilities"], key=row["probabilities"].__getitem__)
        assert 0 <= float(row["confidence"]) <= 1 and int(row["completion_tokens"]) == 0
    assert sum(int(row["cached_tokens"]) > 0 for row in found) == 2
    kept = output.read_bytes()
    assert main([*command, *choices]) == 0 and output.read_bytes() == kept
    for other in ([], [*choices, "green"]):
        assert main([*command, *other]) == 2
        assert "other --choices" in capsys.readouterr().err
    assert output.read_bytes() == kept


@pytest.mark.parametrize(
    "options",
    [["red"], ["red", "red"], ["red", "blue", "--max-tokens", "9"]],
    ids=["one", "twice", "sampled"],
)
def test_choices_that_cannot_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    source = EXAMPLES / "batch" / "videos.csv"
    command = ["video-qa", "-i", str(source), "-o", str(tmp_path / "out.csv"), *ENGINE]
    assert main([*command, "--choices", *options]) == 2
    assert "--choices" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_an_output_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    source, output = EXAMPLES / "batch" / "videos.csv", tmp_path / "out.csv"
    command = ["video-qa", "-i", str(source), "-o", str(output), *ENGINE]
    assert main(command) == 0
    rows = table(output)
    old = [{name: row[name] for name in row if name not in _LATER} for row in rows[1:]]
    with output.open("w", newline="") as file:
        writer = csv.DictWriter(file, old[0])
        writer.writeheader()
        writer.writerows(old)
    assert main(command) == 0
    assert [row["finish_reason"] for row in table(output)] == ["stop", "", ""]
    assert [row["answer"] for row in table(output)] == [row["answer"] for row in rows]


def test_json_lines_with_ids_and_urls(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    rows = [
        {"id": "one", "video": "clip.mp4", "question": "Who?"},
        {"video": "https://host/x.mp4", "question": "Who?"},
    ]
    source.write_text("\n".join(map(json.dumps, rows)))
    local, remote = read_questions(source, [])
    assert (local.id, local.file) == ("one", tmp_path / "clip.mp4")
    assert (remote.url, remote.file) == ("https://host/x.mp4", None)
    assert [each.text for each in read_questions(source, ["What?"])] == ["Who?", "What?"] * 2


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("in.csv", "video,question\n", "no videos"),
        ("in.csv", "video\nx.mp4\n", "--question"),
        ("in.csv", "film\nx.mp4\n", "line 2"),
        ("in.jsonl", "{", "line 1"),
        ("in.jsonl", '{"video": 5}', "line 1"),
        (
            "in.jsonl",
            '{"id": "a", "video": "x", "question": "q"}\n'
            '{"id": "a", "video": "y", "question": "q"}',
            "appears twice",
        ),
        ("in.csv", b"video,question\nx.mp4,caf\xe9\n", "it is not UTF-8 text"),
        ("in.jsonl", b"\xff", "line 1"),
        ("in.txt", "", "folder"),
    ],
)
def test_what_is_missing_is_said(
    tmp_path: Path, name: str, content: str | bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=said):
        read_questions(tmp_path / name, [])
    with pytest.raises(ConfigError, match="nosuch: No such file or directory"):
        read_questions(tmp_path / "nosuch", ["What happens?"])
