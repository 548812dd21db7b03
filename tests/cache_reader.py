"""A client of /v1/cache/events: collects the messages and knows the tree that they tell of."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
from serving import RunningServer

PATH = "/v1/cache/events"


class EventReader:
    """Attributes:
    messages: (id, name, data) of each.
    nodes: by key, as the messages tell of them.
    hits: of the changes.
    ended: the server has ended the stream.
    """

    def __init__(self) -> None:
        self.messages: list[tuple[int, str, dict[str, Any]]] = []
        self.nodes: dict[str, dict[str, Any]] = {}
        self.hits: list[dict[str, Any]] = []
        self.ended = threading.Event()

    def named(self, name: str) -> list[dict[str, Any]]:
        return [data for _, each, data in self.messages if each == name]

    def read(self, response: httpx.Response) -> None:
        text = ""
        try:
            for piece in response.iter_text():
                *whole, text = (text + piece).split("\n\n")
                for message in whole:
                    self._take(message)
        except httpx.HTTPError:
            pass
        self.ended.set()

    def _take(self, message: str) -> None:
        if message == ":":
            return
        lines = dict(line.split(": ", 1) for line in message.split("\n"))
        number, name, data = int(lines["id"]), lines["event"], json.loads(lines["data"])
        if name == "tree":
            assert data["object"] == "cache.tree" and data["sequence"] == number
            self.nodes = {}
            for node in data["nodes"]:
                self._add(node, {root["key"] for root in data["roots"]})
        elif name == "changes":
            assert data["sequence"] == number
            for change in data["changes"]:
                self._apply(change)
        self.messages.append((number, name, data))

    def _add(self, node: dict[str, Any], roots: set[str]) -> None:
        assert node["key"] not in self.nodes
        assert node["parent"] in self.nodes or node["parent"] in roots or not roots
        self.nodes[node["key"]] = node

    def _apply(self, change: dict[str, Any]) -> None:
        kind = change.pop("type")
        if kind == "node_added":
            self._add(change["node"], set())
        elif kind == "node_evicted":
            del self.nodes[change["key"]]
        elif kind == "snapshot_ready":
            self.nodes[change["key"]]["snapshot"] = change["snapshot"]
        elif kind == "snapshot_evicted":
            self.nodes[change["key"]]["snapshot"] = None
        elif kind == "pinned":
            self.nodes[change["key"]] |= change
        else:
            assert kind == "hit"
            self.hits.append(change)


@contextmanager
def reading(server: RunningServer, **options: Any) -> Iterator[EventReader]:
    """Reads in a thread until the block ends."""
    reader = EventReader()
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as client:
        request = client.build_request("GET", PATH, **options)
        response = client.send(request, stream=True)
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        thread = threading.Thread(target=reader.read, args=(response,))
        thread.start()
        try:
            yield reader
        finally:
            # Closing it under the thread that reads would wait for it: the socket goes first.
            stream = response.extensions["network_stream"]
            with suppress(OSError):  # the server may have been first
                stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            thread.join()
            response.close()


def tree(server: RunningServer, **options: Any) -> dict[str, dict[str, Any]]:
    """All nodes, as /v1/cache/tree lists them."""
    nodes: list[dict[str, Any]] = []
    while True:
        query = {"offset": len(nodes), "limit": 1000}
        answer = server.client.get("/v1/cache/tree", params=query, **options)
        assert answer.status_code == 200, answer.text
        page = answer.json()
        nodes += page["nodes"]
        if len(nodes) >= page["total"]:
            return {node["key"]: node for node in nodes}
