"""`benchmarks/endpoints.py` against real servers, and before one that is stricter and says less."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from make_checkpoint import make_checkpoint
from ports import free_port
from serving import RunningServer, running

from benchmarks.common import endpoint
from benchmarks.common.endpoint import ROWS, Plan, Side, measure, ratio
from vlm_serve.cli import main
from vlm_serve.engine.engine import Engine
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "endpoints.py"
SHORT = ("--rounds", "2", "--prompt-tokens", "300", "--answer-tokens", "8")
PLAN = Plan(prompt_tokens=300, answer_tokens=8, rounds=2, seconds=60, seed=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[RunningServer]:
    folder = make_checkpoint(tmp_path_factory.mktemp("checkpoint"))
    config = EngineConfig("cpu", cache_memory="32MiB", block_size=16, max_model_len=2048)
    engine = Engine.from_checkpoint(str(folder), config)
    with running(engine, ServerConfig(port=0, api_key=("secret",))) as opened:
        yield opened


class _Stricter(BaseHTTPRequestHandler):
    """Passes requests on to a server, unless they hold what this endpoint refuses."""

    server_address_behind: ClassVar[tuple[str, int]]
    refused: ClassVar[dict[str, int]]
    """A text in a body -> the HTTP status that it gets."""

    def do_GET(self) -> None:
        self._pass_on(None)

    def do_POST(self) -> None:
        self._pass_on(self.rfile.read(int(self.headers["Content-Length"])))

    def _pass_on(self, body: bytes | None) -> None:
        for text, status in self.refused.items():
            if body is not None and f'"{text}"'.encode() in body:
                self._answer(status, f"{text} is not known here".encode())
                return
        connection = http.client.HTTPConnection(*self.server_address_behind)
        connection.request(self.command, self.path, body, dict(self.headers))
        response = connection.getresponse()
        self._answer(response.status, response.read().replace(b"cached_tokens", b"other_tokens"))
        connection.close()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def stricter(server: RunningServer, **refused: int) -> Iterator[str]:
    """Yields the URL of an endpoint before a server."""
    host, port = server.url.removeprefix("http://").split(":")
    behind = {"server_address_behind": (host, int(port)), "refused": refused}
    endpoint = ThreadingHTTPServer(("127.0.0.1", 0), type("Before", (_Stricter,), behind))
    thread = threading.Thread(target=endpoint.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{endpoint.server_port}"
    finally:
        endpoint.shutdown()
        thread.join()
        endpoint.server_close()


def measured(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


def test_a_server_is_started_measured_and_ended() -> None:
    flags = ("--cache-memory", "32MiB", "--threads", "1")
    done = measured("demo", *SHORT, *flags, "--rounds", "1", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    (side,) = said["endpoints"]
    assert side["model"] == "demo" and not side["refused"] and not side["fields_left_out"]
    samples = {row: side["samples"][row][0] for row in ROWS}
    assert all(each["seconds"] > 0 for each in samples.values())
    assert samples["prefill"]["cached"] == 0
    assert 150 < samples["prefill"]["tokens"] < 600
    assert samples["same prompt again"]["tokens"] == samples["prefill"]["tokens"]
    assert samples["same prompt again"]["cached"] > 100
    assert samples["picture"]["cached"] < samples["same picture again"]["cached"]
    assert samples["decode"]["tokens"] == 8
    assert said["ratios"] == {} and said["rounds"] == 1
    with pytest.raises(OSError):
        http.client.HTTPConnection(side["url"].removeprefix("http://"), timeout=5).request(
            "GET", "/health"
        )


def test_two_endpoints_are_compared_and_what_one_does_not_say_is_named(
    server: RunningServer,
) -> None:
    refused = {"ignore_eos": 400, "stream_options": 422, "image_url": 500}
    with stricter(server, **refused) as peer:
        asked = ("--base-url", server.url, "--api-key", "secret", *SHORT)
        said = measured(*asked, "--peer", f"{peer}/v1/", "--peer-api-key", "secret").stdout
    assert f"test-model at {server.url} " in said and f"test-model at {peer} " in said
    rows = {line[:18].rstrip(): line for line in said.split("\n\n")[0].splitlines()}
    assert "tok/s" in rows["prefill"] and " to " in rows["prefill"]
    assert " cached" in rows["same prompt again"]
    assert rows["picture"].endswith("-") and rows["same picture again"].endswith("-")
    for sentence in (
        "medians of 2 rounds",
        f"{peer} does not report cached tokens",
        f"{peer} does not report tokens, so it has no rates",
        f"{peer} was asked without ignore_eos, stream_options, which it refuses",
        f"picture is missing: {peer}: HTTP 500: image_url is not known here",
    ):
        assert sentence in said


def test_ratios_are_those_of_the_rounds(server: RunningServer) -> None:
    sides = [Side(server.url, key="secret") for _ in range(2)]
    measure(sides, PLAN)
    for side in sides:
        side.client.close()
    for row in ROWS:
        pairs = zip(*(side.samples[row] for side in sides), strict=True)
        found = sorted(theirs.cost / ours.cost for ours, theirs in pairs)
        measured = ratio(sides[0], sides[1], row)
        assert measured is not None
        assert [measured.low, measured.high] == found and len(found) == 2
    for side in sides:  # Nothing of the other side's prompts is found, though it is one server.
        assert all(each is not None and not each.cached for each in side.samples["prefill"])


def test_the_key_and_the_address_must_be_right(server: RunningServer) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    for url, key, said in (
        (server.url, "wrong", "HTTP 401"),
        (nobody, "secret", nobody),
        ("localhost:8000", "secret", "localhost:8000"),
    ):
        side = Side(url, key=key)
        with side.client, pytest.raises(endpoint.EndpointError, match=said):
            measure([side], PLAN)


def test_options_without_an_effect_are_refused() -> None:
    done = measured("--base-url", "http://a", "--threads", "2")
    assert done.returncode == 2 and "--threads has no effect" in done.stderr


def test_the_product_has_no_such_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "demo"])
    assert ended.value.code == 2 and "'bench'" in capsys.readouterr().err


def test_prompts_share_a_length_but_no_beginning() -> None:
    one, other = endpoint.text(100, 1, 2), endpoint.text(100, 1, 3)
    assert len(one.split()) == len(other.split()) == 100
    assert one.split()[16:] == other.split()[16:] and one[:20] != other[:20]
    assert endpoint.picture(2) != endpoint.picture(3)
    assert endpoint.picture(2) == endpoint.picture(2)
