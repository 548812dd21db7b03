"""A client of batches over openai-python with its strictest parsing."""

from __future__ import annotations

import json
import threading
from typing import Any

from server_process import ServerProcess
from serving import RunningServer, wait_for

CHAT: Any = "/v1/chat/completions"
SIZE = 4 << 20


class Batcher:
    """A client with the steps that most tests need."""

    def __init__(self, server: RunningServer | ServerProcess, key: str = "none") -> None:
        import openai  # takes a second, for which no collection of tests waits

        self.api = openai.OpenAI(
            base_url=f"{server.url}/v1",
            api_key=key,
            max_retries=0,
            _strict_response_validation=True,
        )

    def upload(self, *lines: Any) -> str:
        texts = [each if isinstance(each, str) else json.dumps(each) for each in lines]
        content = "\n".join(texts).encode("utf-8", "surrogatepass")
        return self.api.files.create(file=("in.jsonl", content), purpose="batch").id

    def start(self, *lines: Any, endpoint: Any = CHAT, window: Any = "24h", **more: Any) -> Any:
        file = self.upload(*lines)
        return self.api.batches.create(
            input_file_id=file, endpoint=endpoint, completion_window=window, **more
        )

    def ended(self, batch: Any) -> Any:
        """The batch once it has ended."""

        def is_over() -> bool:
            status = self.api.batches.retrieve(batch.id).status
            return status in ("completed", "failed", "expired", "cancelled")

        wait_for(is_over)
        return self.api.batches.retrieve(batch.id)

    def rows(self, file_id: str | None) -> dict[str, Any]:
        assert file_id is not None
        text = self.api.files.content(file_id).read().decode()
        rows = [json.loads(line) for line in text.splitlines()]
        assert len({row["id"] for row in rows}) == len(rows)
        return {row["custom_id"]: row for row in rows}


def answered(client: Batcher, batch: Any) -> int:
    """How many requests of a batch have an answer."""
    counts = client.api.batches.retrieve(batch.id).request_counts
    assert counts is not None
    return counts.completed


def line(custom_id: Any, text: str = "hi", url: Any = CHAT, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], **fields.pop("body", {})}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | fields


def stalled(server: RunningServer, client: Batcher, count: int = 8, **more: Any) -> Any:
    """A batch of which two requests are answered and the next ones hang."""
    batch = client.start(*[line(str(n), f"{n} question") for n in range(count)], **more)
    wait_for(lambda: answered(client, batch) >= 2)
    return batch


def slow(server: RunningServer) -> None:
    """Let the engine answer two requests and stall in the third."""
    tokens = len(server.engine.preprocessor.tokenizer.encode_plain(server.engine.answer))
    server.engine.gate = Gate(2 * tokens)


class Gate:
    """Lets so many tokens pass, then waits to be set."""

    def __init__(self, tokens: int) -> None:
        self.left, self.event = tokens, threading.Event()

    def wait(self, timeout: float) -> bool:
        self.left -= 1
        return self.left >= 0 or self.event.wait(timeout)

    def set(self) -> None:
        self.event.set()

    def clear(self) -> None:
        self.event.clear()
