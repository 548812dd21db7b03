"""A server of one's own for the time of a measurement."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vlm_serve.bench.endpoint import EndpointError
from vlm_serve.options.declared import Option
from vlm_serve.system import child, children

_URL = re.compile(r"^ *URL +(http://\S+)/v1$", re.MULTILINE)
SECONDS_TO_END = 10.0


@contextmanager
def own_server(model: str, engine_flags: Sequence[str], without: Sequence[Option]) -> Iterator[str]:
    """Serve a model on a free port of the loopback interface; yield the URL once it listens.

    Args:
        model: as for `vlm-serve serve`.
        engine_flags: of the engine's options.
        without: options whose environment variables the server does not see.

    Raises:
        EndpointError: the server does not start; it has said why on standard error.
    """
    hidden = {item.env for item in without}
    variables = {name: value for name, value in os.environ.items() if name not in hidden}
    process = children.start(
        "vlm_serve.cli",
        *("serve", model, "--host", "127.0.0.1", "--port", "0"),
        *("--no-page", "--no-access-log", *engine_flags),
        stdout=subprocess.PIPE,
        env=variables | child.search_path(),
    )
    assert process.stdout is not None
    try:
        said = ""
        while (found := _URL.search(said)) is None:
            line = process.stdout.readline()
            if not line:
                raise EndpointError("the server for the measurement has not started, see above")
            said += line.decode(errors="replace")
        yield found[1]
    finally:
        process.terminate()
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def as_flags(options: Sequence[Option], values: Mapping[str, Any]) -> list[str]:
    """Return flags that set options to values of their own types, as a parser reads them back.

    Args:
        options: of one config.
        values: by the option's name; others are left out, and so is None.
    """
    found = []
    for item in options:
        value = values.get(item.name)
        if value is None:
            continue
        flag = item.flags[0]
        if item.kind == "bool":
            found.append(flag if value else f"--no-{flag[2:]}")
        elif item.kind in ("list", "object"):
            found.append(f"{flag}={json.dumps(value)}")
        else:
            found.append(f"{flag}={value}")
    return found
