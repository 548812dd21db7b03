"""Computes a request's affinity keys from its body: large bodies off the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from starlette.types import Scope

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.identity.affinity import affinity_keys_of_body
from vlm_serve.preprocess.reading.reader import APIS
from vlm_serve.server.http.auth import salt_of
from vlm_serve.server.http.body import count_json, parse_counted
from vlm_serve.server.http.request_memory import current_share

R = TypeVar("R")
_log = logging.getLogger(__name__)

SMALL_BYTES = 1 << 14
"""Parsing a body of this size takes less time than waking a thread."""

_threads = ThreadPoolExecutor(1, thread_name_prefix="affinity")
"""One thread: parsing holds the GIL, so more threads would only contend for it."""


async def keys_of(
    scope: Scope, body: bytes, model: str, adapters: frozenset[str] = frozenset()
) -> tuple[bytes, ...]:
    """Return the request's affinity keys, longest prefix first.

    They contain the model's name, or that of the adapter that the request asks for.

    Other routes and malformed bodies have none: the replica reports the error.
    """
    api = APIS.get(scope["path"])
    if api is None:
        return ()
    share = current_share()
    try:
        cost = await _off_the_loop(body, count_json, body)
        if share is not None:
            await share.grow(cost.to_parse())
        return await _off_the_loop(body, _keys, api, body, scope, model, adapters)
    except InvalidRequestError:
        return ()
    except Exception:
        _log.exception("computing affinity keys failed; the request may go to any replica")
        return ()
    finally:
        if share is not None:
            share.shrink(len(body))


async def _off_the_loop(body: bytes, work: Callable[..., R], *args: Any) -> R:
    """Call a function on a thread, or at once if the body is small."""
    if len(body) <= SMALL_BYTES:
        return work(*args)
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(work, *args))


def _keys(
    api: str, body: bytes, scope: Scope, model: str, adapters: frozenset[str]
) -> tuple[bytes, ...]:
    value = parse_counted(body)
    if not isinstance(value, Mapping):
        return ()
    given = value.get("cache_salt")
    salt = salt_of(scope, given if isinstance(given, str) else None)
    asked = value.get("model")
    name = asked if isinstance(asked, str) and asked in adapters else model
    return affinity_keys_of_body(api, value, salt=salt, model=name)
