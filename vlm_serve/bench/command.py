"""Runs `vlm-serve bench` from its arguments to its exit status."""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import sys
from collections.abc import Mapping
from typing import Any

from vlm_serve.bench.endpoint import Endpoint
from vlm_serve.bench.measuring import Plan, Side, measure
from vlm_serve.bench.own_server import as_flags, own_server
from vlm_serve.bench.table import report, table
from vlm_serve.commands.config_file import ALL_OPTIONS
from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import options_of


def bench(
    options: argparse.Namespace, model: str, named: str | None, engine: Mapping[str, Any]
) -> int:
    """Measure, print the result, and return the exit status.

    Args:
        options: of the command line.
        model: to serve where no endpoint is named.
        named: the model that the command line names, if any.
        engine: the given options of the engine.

    Raises:
        ConfigError: options contradict each other.
        EndpointError: an endpoint cannot be measured.
    """
    _check(options, engine)
    plan = Plan(
        options.prompt_tokens,
        options.answer_tokens,
        options.rounds,
        options.seconds,
        secrets.randbits(32),
    )
    with contextlib.ExitStack() as stack:
        url, asked = options.base_url, named
        if url is None:
            flags = as_flags(options_of(EngineConfig), engine)
            url, asked = stack.enter_context(own_server(model, flags, ALL_OPTIONS)), None
        sides = [Side(Endpoint(url, asked, options.api_key))]
        if options.peer is not None:
            sides.append(Side(Endpoint(options.peer, options.peer_model, options.peer_api_key)))
        for side in sides:
            stack.callback(side.endpoint.close)
        print(f"vlm-serve: measuring, about {plan.seconds:g} s at most", file=sys.stderr)
        words = measure(sides, plan)
    if options.json:
        print(json.dumps(report(sides, plan, words), indent=2))
    else:
        print(table(sides))
    return 0


def _check(options: argparse.Namespace, engine: Mapping[str, Any]) -> None:
    """Refuse options without an effect. Raises ConfigError."""
    if options.answer_tokens < 2:
        raise ConfigError("answer_tokens must be at least 2", param="answer_tokens")
    if options.base_url is not None and engine:
        name = next(iter(engine))
        raise ConfigError(
            f"{name} has no effect on the endpoint of --base-url, which runs already", param=name
        )
    if options.base_url is None and options.api_key is not None:
        raise ConfigError("api_key goes with --base-url", param="api_key")
    if options.peer is None:
        for name in ("peer_model", "peer_api_key"):
            if getattr(options, name) is not None:
                raise ConfigError(f"{name} goes with --peer", param=name)
