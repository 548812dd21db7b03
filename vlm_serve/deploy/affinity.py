"""The affinity keys of a request, from what its client has sent: off the loop, if it is much."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from starlette.types import Scope

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.affinity import affinity_keys_of_body
from vlm_serve.server.http.json_body import count_json, parse_counted
from vlm_serve.server.http.request_memory import current_share
from vlm_serve.server.http.tenants import salt_of

R = TypeVar("R")
_log = logging.getLogger(__name__)

APIS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/cache/probe": "chat",
    "/v1/cache/pin": "chat",
}
"""Routes whose requests go where their beginning may be cached."""


SMALL_BYTES = 1 << 14
"""A body that is read sooner than a thread wakes up."""

_threads = ThreadPoolExecutor(1, thread_name_prefix="affinity")
"""One: parsing holds the interpreter's lock, and several would take turns."""


async def keys_of(scope: Scope, body: bytes, model: str) -> tuple[bytes, ...]:
    """Longest prefix first; none for what is no request of an API, or a bad one: the replica that
    gets it says what is wrong."""
    api = APIS.get(scope["path"])
    if api is None:
        return ()
    share = current_share()
    try:
        cost = await _off_the_loop(body, count_json, body)
        if share is not None:
            await share.grow(cost.to_parse())
        return await _off_the_loop(body, _keys, api, body, scope, model)
    except InvalidRequestError:
        return ()
    except Exception:
        _log.exception("a request goes to any replica, for it has no affinity keys")
        return ()
    finally:
        if share is not None:
            share.shrink(len(body))


async def _off_the_loop(body: bytes, work: Callable[..., R], *args: Any) -> R:
    """What a function says, called on a thread unless the body is small."""
    if len(body) <= SMALL_BYTES:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(work, *args))


def _keys(api: str, body: bytes, scope: Scope, model: str) -> tuple[bytes, ...]:
    value = parse_counted(body)
    if not isinstance(value, Mapping):
        return ()
    asked = value.get("cache_salt")
    salt = salt_of(scope, asked if isinstance(asked, str) else None)
    return affinity_keys_of_body(api, value, salt=salt, model=model)
