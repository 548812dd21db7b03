"""The report of an evaluation: one object, written as JSON and as an HTML page."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vlm_serve.errors import ConfigError
from vlm_serve.eval.comparing import Comparison
from vlm_serve.eval.page import page
from vlm_serve.eval.replies import AnswerRun, Reply
from vlm_serve.kernels.native_processor import processor_name

SOME_FAILED, SOME_DIFFER = 3, 4
"""Exit statuses for failed requests and for different answers."""
_MEANING = (
    "Equal means the same text, thought, finish reason and tokens, as far as both sides report "
    "them, and scores with the same bits. This run proves that for these questions on this "
    "machine.",
    "Accuracy is only as meaningful as the questions. The built-in demo models, checkpoints of "
    "random weights and the samples of vlm-serve show that answers are equal; their scores "
    "say nothing about accuracy.",
    "Each side ran once, the one with caching first, and started every part with an empty cache. "
    "Seconds are wall time and depend on other load of the machine; token counts do not.",
)


@dataclass(frozen=True, slots=True)
class Subject:
    """The subject of an evaluation: benchmark, model, file of questions (if any) and settings."""

    title: str
    model: str
    data: Path | None
    settings: Mapping[str, Any]


def make_report(subject: Subject, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Return all results of a run, ready for JSON."""
    different = sum(comparison.num_different for comparison in comparisons)
    failed = sum(comparison.num_failed for comparison in comparisons)
    items = sum(comparison.num_items for comparison in comparisons)
    return {
        "title": subject.title,
        "model": subject.model,
        "data": {"file": subject.data.name, "sha256": _digest(subject.data)}
        if subject.data is not None
        else None,
        "settings": dict(subject.settings),
        "machine": {
            "processor": processor_name(),
            "python": platform.python_version(),
            "vlm-serve": version("vlm-serve"),
        },
        "items": items,
        "equal": items - different - failed,
        "different": different,
        "failed": failed,
        "verdict": _verdict(items, different, failed),
        "meaning": list(_MEANING),
        "parts": [_part(comparison) for comparison in comparisons],
    }


def status_of(report: Mapping[str, Any]) -> int:
    """Return the exit status for a report: 0 if all answers exist on both sides and are equal."""
    if report["different"]:
        return SOME_DIFFER
    return SOME_FAILED if report["failed"] or not report["items"] else 0


def write_report(report: Mapping[str, Any], output: Path) -> None:
    """Write the page `output`, and the report as .json beside it.

    Raises ConfigError if a file cannot be written.
    """
    try:
        output.with_suffix(".json").write_text(
            json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        output.write_text(page(report), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}", param="output") from None


def check_output(output: Path) -> None:
    """Raise ConfigError if the output cannot be a report, before anything runs."""
    if output.suffix not in (".html", ".htm"):
        raise ConfigError("the output's name must end with .html", param="output")
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"{output.parent}: there is no such folder", param="output")


def _verdict(items: int, different: int, failed: int) -> str:
    if not different and not failed:
        return f"All {items} answers are the same with and without prefix caching."
    problems = []
    if different:
        problems.append(f"{different} of {items} answers differ between the two sides")
    if failed:
        problems.append(f"{failed} of {items} could not be answered on both")
    return " and ".join(problems) + "."


def _part(comparison: Comparison) -> dict[str, Any]:
    different = {difference.item for difference in comparison.differences}
    failed = {item for _, item, _ in comparison.failed}
    return {
        "name": comparison.part,
        "note": comparison.note,
        "items": comparison.num_items,
        "equal": comparison.num_equal,
        "different": comparison.num_different,
        "failed": comparison.num_failed,
        "accuracy": {
            group: {"right": right, "of": known}
            for group, (right, known) in comparison.accuracy.items()
        },
        "with_caching": _side(comparison.cached),
        "without_caching": _side(comparison.uncached),
        "differences": [asdict(difference) for difference in comparison.differences],
        "failures": [
            {"side": side, "item": item, "error": error} for side, item, error in comparison.failed
        ],
        "answers": [
            _answer(reply, same=reply.item not in different and reply.item not in failed)
            for reply in comparison.cached.replies
        ],
    }


def _side(run: AnswerRun) -> dict[str, Any]:
    return {
        "seconds": round(run.seconds, 3),
        "prompt_tokens": run.tokens.prompt,
        "cached_tokens": run.tokens.cached,
        "computed_tokens": run.tokens.computed,
        "generated_tokens": run.tokens.generated,
        "hit_rate": round(run.tokens.hit_rate, 4),
    }


def _answer(reply: Reply, *, same: bool) -> dict[str, Any]:
    return {
        "item": reply.item,
        "answers": [answer.text for answer in reply.answers],
        "finish_reasons": [answer.finish_reason for answer in reply.answers],
        "scores": [sum(probabilities) for probabilities in reply.scores],
        "chosen": reply.chosen,
        "expected": reply.expected,
        "right": reply.right,
        "hit_rate": round(reply.tokens.hit_rate, 4),
        "error": reply.error,
        "same": same,
    }


def _digest(path: Path) -> str | None:
    """Return the SHA-256 of a file; None if there is no such file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
