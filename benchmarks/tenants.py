"""Check whether a tenant can tell from the time to first token what another tenant asked.

    python benchmarks/tenants.py [MODEL] [--rounds 15]

Two API keys have salts of their own. In every round one tenant asks about a picture that nobody has
asked about, the other asks the same, and then asks again; they take turns in being the first. The
other's first question must cost what the first tenant's did; asking again shows what a shared entry
would have cost. The run fails if the cache report says that anything was shared, or if the middle
half of the pairs' ratios lies beside 1.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
import statistics
import sys
import tempfile
import time
from typing import Any

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
import httpx
from PIL import Image
from server_process import server_process

KEYS = ("key-of-alice", "key-of-bob")
SERVE = ("--cache-memory", "128MiB", "--threads", "1", "--max-model-len", "4096")
SIZE = 448
COLD = {"boundary": 0, "kv_boundary": 0, "media_decoded": 1, "media_encoded": 1, "media_skipped": 0}


def question(number: int) -> dict[str, Any]:
    """A chat about a picture of noise, which is different for every number."""
    noise = random.Random(number).randbytes(SIZE * SIZE * 3)
    data = io.BytesIO()
    Image.frombytes("RGB", (SIZE, SIZE), noise).save(data, "png", compress_level=0)
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What do you see?"},
    ]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 1,
        "temperature": 0,
        "cache_report": True,
    }


def ask(client: httpx.Client, key: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Milliseconds to an answer of one token, and the cache report."""
    begin = time.perf_counter()
    answer = client.post(
        "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
    )
    taken = 1000 * (time.perf_counter() - begin)
    answer.raise_for_status()
    report: dict[str, Any] = answer.json()["cache_report"]
    return taken, report


def measure(client: httpx.Client, rounds: int) -> tuple[list[tuple[float, ...]], int]:
    """Per round the milliseconds of first, other and again, and the reports that show sharing."""
    rows, shared = [], 0
    for number in range(rounds + 1):
        first, other = KEYS if number % 2 else KEYS[::-1]
        body = question(number)
        asked = [ask(client, key, body) for key in (first, other, other)]
        shared += sum(not report.items() >= COLD.items() for _, report in asked[:2])
        assert asked[2][1]["boundary"] > 0, (
            "asking again found nothing: there is nothing to compare"
        )
        rows.append(tuple(taken for taken, _ in asked))
    return rows[1:], shared  # the first round warms up


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as keys:
        keys.write("".join(f"{key}: {key[-3:]}\n" for key in KEYS))
        keys.flush()
        with (
            server_process(options.model, *SERVE, "--tenant-keys", keys.name) as server,
            httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client,
        ):
            rows, shared = measure(client, options.rounds)
    for name, column in zip(("first", "other", "again"), zip(*rows, strict=True), strict=True):
        print(f"{name}   {statistics.median(column):8.1f} ms to the first token")
    low, middle, high = statistics.quantiles([other / first for first, other, _ in rows], n=4)
    print(f"other / first   {middle:.3f}   (half of the pairs between {low:.3f} and {high:.3f})")
    again = statistics.median(again / first for first, _, again in rows)
    print(f"again / first   {again:.3f}")
    print(f"reports that show something shared: {shared}")
    fine = not shared and low <= 1 <= high
    print("equal within noise, nothing shared" if fine else "tenants can tell each other apart")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
