"""Which tokens end an answer and a turn, in every layout of a checkpoint's files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from vlm_serve.errors import CheckpointError
from vlm_serve.preprocess.text.tokenizer import Tokenizer

TURN, TEXT, TOOL = "<|im_end|>", "<|endoftext|>", "<tool_call>"
UNKNOWN = 10**6


def layout(
    checkpoint: Path,
    path: Path,
    *,
    eos_token: Any = TURN,
    tokens_map: dict[str, Any] | None = None,
    generation: Any = None,
    outer: Any = None,
    inner: Any = None,
) -> Path:
    """A copy whose files name these end tokens; None: that file or field is missing."""
    shutil.copytree(checkpoint, path, ignore=shutil.ignore_patterns("*.safetensors"))
    (path / "generation_config.json").unlink()
    if generation is not None:
        written = {"eos_token_id": generation} if generation != "nothing" else {}
        (path / "generation_config.json").write_text(json.dumps(written))
    if tokens_map is not None:
        (path / "special_tokens_map.json").write_text(json.dumps(tokens_map))
    named = json.loads((path / "tokenizer_config.json").read_text())
    del named["eos_token"]
    if eos_token is not None:
        named["eos_token"] = eos_token
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    config = json.loads((path / "config.json").read_text())
    for section, value in ((config, outer), (config["text_config"], inner)):
        section.pop("eos_token_id", None)
        if value is not None:
            section["eos_token_id"] = value
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="session")
def ids(checkpoint: Path) -> dict[str, int]:
    found = Tokenizer(checkpoint).special_tokens
    return {token: found[token] for token in (TURN, TEXT)} | {TOOL: found.get(TOOL, 5)}


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({"inner": TEXT}, {TURN, TEXT}),
        ({"inner": [TEXT]}, {TURN, TEXT}),
        ({"outer": TEXT}, {TURN, TEXT}),
        ({"outer": [TEXT, TURN]}, {TURN, TEXT}),
        ({"outer": TEXT, "inner": TOOL}, {TURN, TEXT, TOOL}),
        ({"generation": TEXT}, {TURN, TEXT}),
        ({"generation": [TOOL], "inner": TEXT}, {TURN, TEXT, TOOL}),
        ({"generation": [TEXT, TURN], "outer": TOOL}, {TURN, TEXT, TOOL}),
        ({"generation": "nothing", "inner": TEXT}, {TURN, TEXT}),
        ({}, {TURN}),
        ({"eos_token": {"content": TURN, "special": True}, "inner": TEXT}, {TURN, TEXT}),
        ({"eos_token": TEXT}, {TEXT}),
        ({"eos_token": TEXT, "inner": TEXT}, {TEXT}),
        ({"eos_token": None, "tokens_map": {"eos_token": TURN}, "inner": TEXT}, {TURN, TEXT}),
        ({"eos_token": None, "tokens_map": {"eos_token": {"content": TEXT}}}, {TEXT}),
        ({"eos_token": TURN, "tokens_map": {"eos_token": TEXT}}, {TURN}),
        ({"eos_token": None, "inner": TEXT}, {TURN, TEXT}),
        ({"eos_token": None}, {TURN}),
        ({"eos_token": "no such token", "inner": TEXT}, {TURN, TEXT}),
        ({"inner": UNKNOWN, "generation": [TEXT]}, {TURN, TEXT}),
    ],
)
def test_all_that_files_name_ends_an_answer(
    checkpoint: Path, tmp_path: Path, ids: dict[str, int], fields: dict[str, Any], ends: set[str]
) -> None:
    def numbered(value: Any) -> Any:
        if isinstance(value, list):
            return [numbered(each) for each in value]
        return ids.get(value, value) if isinstance(value, str) else value

    given = {
        name: value if name in ("eos_token", "tokens_map") else numbered(value)
        for name, value in fields.items()
    }
    tokenizer = Tokenizer(layout(checkpoint, tmp_path / "c", **given))
    assert tokenizer.eos_ids == {ids[token] for token in ends}
    assert ids[TURN] in tokenizer.end_of_turn_ids


def test_a_token_added_by_the_config_ends_an_answer(
    checkpoint: Path, tmp_path: Path, ids: dict[str, int]
) -> None:
    path = layout(checkpoint, tmp_path / "c", inner=ids[TEXT])
    data = json.loads((path / "tokenizer.json").read_text())
    named = json.loads((path / "tokenizer_config.json").read_text())
    added = [
        each
        for each in data["added_tokens"]
        if each["id"] == max(each["id"] for each in data["added_tokens"])
    ]
    assert len(added) == 1
    data["added_tokens"].remove(added[0])
    (path / "tokenizer.json").write_text(json.dumps(data))
    entry = {name: value for name, value in added[0].items() if name != "id"} | {"special": True}
    named |= {"added_tokens_decoder": {str(added[0]["id"]): entry}, "eos_token": entry["content"]}
    (path / "tokenizer_config.json").write_text(json.dumps(named))
    assert added[0]["id"] in Tokenizer(path).eos_ids


@pytest.mark.parametrize("fields", [{"inner": UNKNOWN}, {"outer": [UNKNOWN]}, {"inner": True}])
def test_an_end_that_nothing_else_backs_up_is_refused(
    checkpoint: Path, tmp_path: Path, fields: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match=r"eos_token_id .* is not a token of this checkpoint"):
        Tokenizer(layout(checkpoint, tmp_path / "c", **fields))


def test_templates_see_the_tokens_map(checkpoint: Path, tmp_path: Path) -> None:
    tokens_map = {"eos_token": TEXT, "bos_token": {"content": TOOL}, "additional": 3}
    path = layout(checkpoint, tmp_path / "c", eos_token=None, tokens_map=tokens_map)
    names = Tokenizer(path).special_names
    assert (names["eos_token"], names["bos_token"]) == (TEXT, TOOL)
