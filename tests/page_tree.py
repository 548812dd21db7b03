"""Trees of any size as the stream of cache events tells them, for the page's tests."""

from __future__ import annotations

import json
import random
from typing import Any

from playwright.sync_api import Route

BLOCK = 16
ROOT = "f" * 64
LONGEST = 4096


def tree_of(num_nodes: int, seed: int = 0) -> dict[str, Any]:
    """The data of an event `tree`: prompts that share beginnings, with pictures and snapshots."""
    choice = random.Random(seed)
    ends = {ROOT: 0}
    recent = [ROOT]
    nodes: list[dict[str, Any]] = []
    for number in range(num_nodes):
        parent = choice.choice(recent[-1:] if choice.random() < 0.7 else recent)
        if ends[parent] >= LONGEST:
            parent = ROOT
        key = f"{number:064x}"
        start = ends[parent]
        ends[key] = start + BLOCK
        recent = [*recent[-60:], key]
        nodes.append(node(key, parent, start, media=choice.random() < 0.02))
        if choice.random() < 0.05:
            nodes[-1]["snapshot"] = "turn"
    return {"object": "cache.tree", "sequence": 1, "roots": [{"key": ROOT}], "nodes": nodes}


def node(key: str, parent: str, start: int, *, media: bool = False, **other: Any) -> dict[str, Any]:
    """One node as the server describes it."""
    span = {"offset": 2, "length": 4 * BLOCK, "kind": "image", "hash": key[-16:]}
    return {
        "key": key,
        "parent": parent,
        "start": start,
        "end": start + BLOCK,
        "tail": False,
        "exact": True,
        "media": [span] if media else [],
        "snapshot": None,
        "tier": "device",
        "pins": 0,
        "hits": 1,
        "num_bytes": 8192,
        **other,
    }


def event(name: str, data: dict[str, Any]) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def telling(route: Route, *events: str) -> None:
    """Answers a request for the stream; the page asks again when it has ended."""
    headers = {"content-type": "text/event-stream"}
    route.fulfill(status=200, headers=headers, body="".join(events))
