"""GET /v1/cache/events: the cache's tree and its changes, as server-sent events."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from vlm_serve.cache.listing import ListedNode, NodeInfo
from vlm_serve.cache.records import Hit
from vlm_serve.engine.engine import Engine
from vlm_serve.engine.features.mirror import Change, PastChange, TreeListing
from vlm_serve.server.api.cache.inspection import (
    VisibleRoots,
    refuse_unknown,
    with_own_number,
)
from vlm_serve.server.http.auth import share_of
from vlm_serve.server.http.errors import PermissionDeniedError
from vlm_serve.server.http.streaming import Events, EventStream, until_disconnected
from vlm_serve.server.service import Service

SLICE = 16
"""Nodes or changes serialized at once, in a fraction of a millisecond. Other requests run on the
event loop in between, and each needs several turns of it."""
MIN_CHANGES = 1000
"""Up to this many changes are sent one by one, even if the tree has fewer nodes."""
QUIET_POLLS = 150
"""After this many polls without a message, a comment shows that the connection is alive."""

_T = TypeVar("_T")
_as_text = json.JSONEncoder(separators=(",", ":")).encode
_NODE_FIELDS = tuple(field.name for field in dataclasses.fields(NodeInfo))
_values_of = attrgetter(*_NODE_FIELDS)


class CacheHistoryEvent(BaseModel):
    """The data of a `history` event; each item has its age."""

    object: Literal["cache.history"] = "cache.history"
    statuses: list[dict[str, Any]]
    events: list[dict[str, Any]]


async def cache_events(service: Service, request: Request) -> Response:
    """Stream the cache's tree, its changes and the server's status: GET /v1/cache/events.

    Raises:
        OverloadedError: too many clients read the stream already.
        PermissionDeniedError: a browser sent the request in a mode that hides the response.
    """
    refuse_unknown(request.query_params, ())
    if request.headers.get("sec-fetch-mode") == "no-cors":
        # Any website can make a browser send such a request, but cannot read the response.
        raise PermissionDeniedError(
            "this stream is only for clients that can read the response", code="no_cors"
        )
    visible = VisibleRoots(service, request).refresh()
    subscriber = _Subscriber(service, visible, share_of(request.scope))
    if request.scope.get("is_head"):
        return Response(media_type=EventStream.media_type)
    events = subscriber.events()
    first = asyncio.ensure_future(anext(events))
    await until_disconnected(request, first)
    return EventStream(first, events, {})


class _Subscriber:
    """One subscriber.

    Args:
        visible: it sees these nodes; totals only if that is everything.
        share: see `CacheFeed.subscribed`.
    """

    def __init__(self, service: Service, visible: VisibleRoots, share: bytes) -> None:
        self._share = share
        self._engine: Engine = service.engine
        self._feed = service.cache_feed
        self._seconds = service.config.send_timeout
        self._visible = visible
        self._number = 0

    async def events(self) -> Events:
        """Yield the messages in pieces.

        They end when the server does, or when the client takes too long to receive one.
        """
        loop, feed = asyncio.get_running_loop(), self._feed
        with feed.subscribed(self._share):
            await asyncio.to_thread(feed.mirror.refresh)
            # The latest status is part of the history; as one of now it would be wrong.
            sequence, status_number, quiet = -1, feed.status_number, 0
            while True:
                first = sequence < 0
                sequence, pieces = self._messages_since(sequence)
                if first:
                    pieces = chain(pieces, self._history(sequence))
                if self._visible.everything and feed.status_number != status_number:
                    status_number = feed.status_number
                    pieces = chain(pieces, self._status(sequence))
                deadline, quiet = loop.time() + self._seconds, quiet + 1
                for piece in pieces:
                    quiet = 0
                    yield piece
                    await asyncio.sleep(0)
                    if loop.time() > deadline:
                        return
                if quiet == QUIET_POLLS:
                    quiet = 0
                    yield b":\n\n"
                if not await feed.next_poll():
                    return

    def _messages_since(self, sequence: int) -> tuple[int, Iterator[bytes]]:
        """Return the latest batch's number, and the messages since batch `sequence`."""
        mirror = self._feed.mirror
        update = mirror.since(sequence)
        if update is None or len(update[1]) > max(MIN_CHANGES, len(mirror)):
            whole = mirror.listing()
            return whole.sequence, self._tree(whole)
        sequence, changes = update
        self._visible.refresh()
        if not self._visible.everything:
            changes = tuple(change for change in changes if change.root in self._visible)
        return sequence, self._changes(sequence, changes) if changes else iter(())

    def _tree(self, whole: TreeListing) -> Iterator[bytes]:
        entries = self._visible.refresh().below(whole.entries)
        number = self._message_number(whole.sequence)
        roots = json.dumps([{"key": key.hex()} for key in dict.fromkeys(e.root for e in entries)])
        yield (
            f'id: {number}\nevent: tree\ndata: {{"object":"cache.tree","sequence":{number},'
            f'"roots":{roots},"nodes":['
        ).encode()
        yield from _joined(entries, self._node)
        yield b"]}\n\n"

    def _changes(self, sequence: int, changes: Sequence[Change]) -> Iterator[bytes]:
        number = self._message_number(sequence)
        yield (f'id: {number}\nevent: changes\ndata: {{"sequence":{number},"changes":[').encode()
        yield from _joined(changes, self._change)
        yield b"]}\n\n"

    def _history(self, sequence: int) -> Iterator[bytes]:
        number = self._message_number(sequence)
        statuses = self._feed.history() if self._visible.everything else []
        told = CacheHistoryEvent(
            statuses=[{"age_seconds": round(age, 1), **status} for age, status in statuses],
            events=[
                {"age_seconds": round(age, 1), **_past_body(event)}
                for age, event in self._feed.mirror.recent.latest(self._visible)
            ],
        )
        yield f"id: {number}\nevent: history\ndata: {told.model_dump_json()}\n\n".encode()

    def _status(self, sequence: int) -> Iterator[bytes]:
        data = _as_text(self._feed.status)
        yield f"id: {sequence}\nevent: status\ndata: {data}\n\n".encode()

    def _message_number(self, sequence: int) -> int:
        """Return a message's number.

        Tenants get numbers of their own, since a batch's number shows how much others do.
        """
        if self._visible.everything:
            return sequence
        self._number += 1
        return self._number

    def _node(self, entry: ListedNode) -> dict[str, Any]:
        """Return the same as `dataclasses.asdict` in a third of the time."""
        node = self._engine.describe(entry)
        body: dict[str, Any] = dict(zip(_NODE_FIELDS, _values_of(node), strict=True))
        body["media"] = [dataclasses.asdict(medium) for medium in node.media]
        return body if self._visible.everything else with_own_number(body)

    def _change(self, change: Change) -> dict[str, Any]:
        body: dict[str, Any] = {"type": change.kind, "key": change.key.hex()}
        if change.hit is not None:
            body |= _hit_body(change.hit)
        elif change.kind == "snapshot_ready":
            body["snapshot"] = change.snapshot
        elif change.entry is not None and change.kind != "snapshot_evicted":
            node = self._node(change.entry)
            if change.kind == "node_added":
                return {"type": change.kind, "node": node}
            body |= {name: node[name] for name in ("pins", "hits", "snapshot_hits", "num_bytes")}
        return body


def _past_body(past: PastChange) -> dict[str, Any]:
    if past.hit is not None:
        return {"type": past.kind, **_hit_body(past.hit)}
    return {"type": past.kind, "nodes": past.num_nodes, "tokens": past.num_tokens}


def _hit_body(hit: Hit) -> dict[str, Any]:
    return {
        "prompt_tokens": hit.prompt_tokens,
        "cached_tokens": hit.boundary,
        "reason": hit.reason,
        "joined_tokens": hit.joined_tokens,
        "joined_ms": hit.joined_ms,
    }


def _joined(items: Sequence[_T], body_of: Callable[[_T], dict[str, Any]]) -> Iterator[bytes]:
    """Yield the bodies as the inside of a JSON list, one slice at a time."""
    for start in range(0, len(items), SLICE):
        texts = [_as_text(body_of(item)) for item in items[start : start + SLICE]]
        yield (("," if start else "") + ",".join(texts)).encode()
