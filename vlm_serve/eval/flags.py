"""Arguments of `vlm-serve eval`, and their choices."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import options_of
from vlm_serve.options.flags import add_options, positive
from vlm_serve.server.config import SPLITTING

Adder = Callable[[argparse.ArgumentParser], None]
_COMPARED = "enable_prefix_caching"
PARTS = ("direct", "two-turn", "two-turn-omitting", "scoring")
"""Parts of LongBench v2."""
DEFAULT_PARTS = ("direct", "two-turn", "scoring")
DECODING = ("greedy", "seeded")
"""Decoding of answers."""
THROUGH = ("server", "pipeline")
"""Interfaces between lmms-eval and the model."""


def add_eval_commands(
    commands: Any, run: Callable[[argparse.Namespace], int], model: Adder
) -> None:
    """Add `eval` with its benchmarks; `model` adds the arguments for the model."""
    parser = commands.add_parser("eval", help="compare answers with and without prefix caching")
    benchmarks = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")

    longbench = benchmarks.add_parser(
        "longbench", help="LongBench v2: questions about long documents"
    )
    longbench.add_argument(
        "--part",
        action="append",
        choices=PARTS,
        help=f"kind of questions; may be repeated (default: {', '.join(DEFAULT_PARTS)})",
    )
    longbench.add_argument(
        "--reasoning-tokens",
        type=positive,
        default=1024,
        metavar="N",
        help="maximum reasoning tokens in the first turn (default: 1024)",
    )
    data_help = "a JSON or JSON lines file in LongBench v2's form; hub fetches the published one"
    _finish(longbench, "longbench", run, model, ("FILE|hub", data_help), temperature=0.1)

    video = benchmarks.add_parser("video", help="questions about videos, several of each")
    data = ("FILE", ".csv or .jsonl with video, question, answer and, if wanted, choices")
    _finish(video, "video", run, model, data, temperature=0.7)
    _add_lmms(benchmarks, run, model)


def _add_lmms(benchmarks: Any, run: Callable[[argparse.Namespace], int], model: Adder) -> None:
    lmms = benchmarks.add_parser("lmms", help="tasks of lmms-eval, which is installed separately")
    lmms.set_defaults(run=run, benchmark="lmms")
    lmms.add_argument("--tasks", required=True, metavar="A,B", help="as for lmms-eval")
    lmms.add_argument(
        "--through",
        action="append",
        choices=THROUGH,
        help="interface to the model; may be repeated (default: both)",
    )
    lmms.add_argument("--include-path", type=Path, metavar="DIR", help="folder of additional tasks")
    lmms.add_argument(
        "--lmms-eval",
        default="",
        metavar="COMMAND",
        help="command that starts lmms-eval in another environment: its python with "
        "-m vlm_serve.eval.lmms_run (default: this python)",
    )
    lmms.add_argument(
        "--max-frames",
        type=positive,
        default=8,
        metavar="N",
        help="frames per video (default: 8)",
    )
    lmms.add_argument(
        "--limit",
        type=positive,
        metavar="N",
        help="only the first N samples per task (default: all)",
    )
    lmms.add_argument(
        "--timeout",
        type=positive,
        default=3600,
        metavar="SECONDS",
        help="time limit for each run of lmms-eval (default: 3600)",
    )
    _add_common(lmms, "lmms", model)


def _finish(
    parser: argparse.ArgumentParser,
    name: str,
    run: Callable[[argparse.Namespace], int],
    model: Adder,
    data: tuple[str, str],
    *,
    temperature: float,
) -> None:
    """Add the arguments of benchmarks without a harness; `data`: metavar and help of --data."""
    parser.set_defaults(run=run, benchmark=name)
    parser.add_argument("--lora", metavar="NAME", help="answer with this one of --lora-modules")
    parser.add_argument("--data", required=True, metavar=data[0], help=data[1])
    parser.add_argument(
        "--decoding",
        action="append",
        choices=DECODING,
        help="decoding of answers; may be repeated (default: both)",
    )
    parser.add_argument(
        "--max-tokens",
        type=positive,
        default=128,
        metavar="N",
        help="maximum tokens per answer (default: 128)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=temperature,
        metavar="X",
        help=f"temperature of seeded answers (default: {temperature})",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of seeded answers (default: 0)")
    parser.add_argument(
        "--limit", type=positive, metavar="N", help="only the first N questions (default: all)"
    )
    parser.add_argument(
        "--concurrency",
        type=positive,
        default=1,
        metavar="N",
        help="documents or videos to process concurrently (default: 1)",
    )
    _add_common(parser, name, model)


def _add_common(parser: argparse.ArgumentParser, name: str, model: Adder) -> None:
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path(f"eval-{name}.html"),
        metavar="FILE",
        help=f"the report; a .json copy lies beside it (default: eval-{name}.html)",
    )
    model(parser)
    add_options(parser, SPLITTING)
    add_options(parser, [option for option in options_of(EngineConfig) if option.name != _COMPARED])
