"""Readers of lmms-eval's output: the samples of each task, and the pipeline's log."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlm_serve.errors import EvaluationError
from vlm_serve.eval.replies import Reply, TokenCounts, TurnAnswer

FAILED = "[LMMS_EVAL_REQUEST_FAILED"
"""Begins the answer of lmms-eval's clients to a failed request. lmms-eval scores it like any other
answer and exits with 0."""
_OVER_BUDGET = "[LMMS_EVAL_BUDGET_EXCEEDED"
_NAME = re.compile(r"\d+_\d+_samples_(.+)\.jsonl")
_NO_METRICS = {"doc_id", "target", "resps", "filtered_resps", "token_counts", "doc_hash", "input"}


def read_samples(folder: Path) -> list[Reply]:
    """Return a reply for each sample below a folder, sorted by task and number.

    Raises EvaluationError if there are no samples.
    """
    samples = []
    for path in sorted(folder.rglob("*_samples_*.jsonl")):
        name = _NAME.fullmatch(path.name)
        task = name[1] if name else path.stem
        samples += [(task, sample) for sample in _json_lines(path)]
    if not samples:
        raise EvaluationError("lmms-eval has written no answers")
    samples.sort(key=lambda entry: (entry[0], entry[1]["doc_id"]))
    return [_reply(task, sample) for task, sample in samples]


def with_log(replies: list[Reply], log: Path) -> list[Reply]:
    """Add finish reasons and tokens from the pipeline's log to the replies."""
    noted = {note["item"]: note for note in _json_lines(log)}
    return [_with_note(reply, noted[reply.item]) for reply in replies]


def _json_lines(path: Path) -> list[Any]:
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line.strip()]


def _with_note(reply: Reply, note: Mapping[str, Any]) -> Reply:
    if note["error"] is not None:
        return replace(reply, answers=(), error=note["error"])
    answers = tuple(
        TurnAnswer(**answer | {"token_ids": tuple(answer["token_ids"])})
        for answer in note["answers"]
    )
    return replace(reply, answers=answers, tokens=TokenCounts(**note["tokens"]))


def _reply(task: str, sample: Mapping[str, Any]) -> Reply:
    item = f"{task}/{sample['doc_id']}"
    texts = _flat(sample.get("resps", sample["filtered_resps"]))
    for text in texts:
        if text.startswith((FAILED, _OVER_BUDGET)):
            return Reply(item, error=text)
    counts = [count for count in sample.get("token_counts") or () if count]
    scores = [value for name, value in sample.items() if name not in _NO_METRICS]
    known = [bool(value) for value in scores if isinstance(value, int | float) and value in (0, 1)]
    return Reply(
        item,
        tuple(map(TurnAnswer, texts)),
        chosen=" ".join(_flat(sample["filtered_resps"])),
        expected=str(sample["target"]),
        right=known[0] if known else None,
        groups=(task,),
        tokens=TokenCounts(
            prompt=sum(count.get("input_tokens") or 0 for count in counts),
            generated=sum(count.get("output_tokens") or 0 for count in counts),
        ),
    )


def _flat(value: Any) -> list[str]:
    """Flatten nested lists of texts."""
    if isinstance(value, list):
        return [text for member in value for text in _flat(member)]
    return [str(value)]
