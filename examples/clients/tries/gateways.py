"""Gateways in front of the server: they find it, and answers pass through them unchanged."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
from common import (
    ASK_PARIS,
    CLIENT,
    KEY,
    MODEL,
    PICTURE_PARTS,
    ROOT_URL,
    SAY,
    TOOL,
    URL,
    holds,
    step,
)


def fetched(url: str, body: dict[str, Any] | None = None) -> Any:
    """Send a request, and read its answer's JSON."""
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    data = json.dumps(body).encode() if body else None
    with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60) as made:
        return json.load(made)


@contextlib.contextmanager
def gateway(*command: str) -> Iterator[str]:
    """Start a gateway on a free port; yield its URL once it names a model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    log = Path("gateway.log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", port],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(180):
            with contextlib.suppress(OSError):
                if fetched(f"{url}/v1/models")["data"]:
                    break
            assert process.poll() is None, log.read_text()[-1500:]
            time.sleep(1)
        else:
            raise AssertionError(f"it names no models: {log.read_text()[-1500:]}")
        yield url
    finally:
        process.terminate()
        process.wait(30)


def ask(url: str) -> None:
    """Ask a picture, a stream and a tool call over a gateway."""
    api = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    create: Any = api.chat.completions.create
    with step("a picture"):
        made = create(model=MODEL, messages=[{"role": "user", "content": PICTURE_PARTS}])
        holds(made.choices[0].message.content, "heart")
        assert made.usage.prompt_tokens > 10
    with step("a stream"):
        chunks = create(model=MODEL, messages=[{"role": "user", "content": SAY}], stream=True)
        pieces = [each.choices[0].delta.content or "" for each in chunks if each.choices]
        holds("".join(pieces), "hello to you")
        assert len(pieces) > 1
    with step("a tool call"):
        messages = [{"role": "user", "content": ASK_PARIS}]
        (call,) = create(model=MODEL, messages=messages, tools=[TOOL]).choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}


def litellm_proxy() -> None:
    model = {"model": f"hosted_vllm/{MODEL}", "api_base": URL, "api_key": KEY}
    os.environ["LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY"] = "true"
    settings = {"model_list": [{"model_name": MODEL, "litellm_params": model}]}
    Path("proxy.json").write_text(json.dumps(settings))
    with gateway("litellm", "--config", "proxy.json") as url:
        ask(url)
        with step("messages over its own translation"):
            body = {
                "model": MODEL,
                "max_tokens": 200,
                "messages": [{"role": "user", "content": SAY}],
            }
            holds(fetched(f"{url}/v1/messages", body)["content"][0]["text"], "hello to you")


def vllm_router() -> None:
    with gateway("vllm-router", "--worker-urls", ROOT_URL, "--policy", "cache_aware") as url:
        ask(url)


def sglang_router() -> None:
    start = (sys.executable, "-m", "sglang_router.launch_router", "--worker-urls", ROOT_URL)
    with gateway(*start) as url:
        ask(url)


globals()[CLIENT.replace("-", "_")]()
