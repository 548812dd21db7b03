"""Admission of requests, accounting of what open ones hold, and waiting for them at shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from vlm_serve.engine.requests.tenant import Tenant
from vlm_serve.errors import EngineClosedError, OverloadedError
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.errors import DrainingError
from vlm_serve.server.http.request_memory import RequestMemory
from vlm_serve.server.http.tenants import Places

if TYPE_CHECKING:
    from vlm_serve.engine.engine import Engine


class AdmissionControl:
    """Admits requests up to the server's limits. It is used on the event loop only.

    Args:
        engine: the engine that answers.
        config: the server's options.
        on_freed: called with the number of bytes that a request gives back.

    Attributes:
        requests: counter of open requests.
        memory: budget for the bodies, media and prompts of open requests.
        open_tokens: prompt tokens of open requests.
        tokens_of: those of each tenant.
        on_idle: called when the last open request has ended.
    """

    def __init__(
        self, engine: Engine, config: ServerConfig, on_freed: Callable[[int], None]
    ) -> None:
        self.requests = OpenRequests()
        self.memory = RequestMemory(config.max_request_bytes, on_freed)
        self.open_tokens = 0
        self.tokens_of = Places()
        self.on_idle: Callable[[], None] = lambda: None
        self._engine = engine
        self._config = config

    @contextlib.contextmanager
    def admitted(self, tenant: Tenant, *, resumed: bool = False) -> Iterator[None]:
        """Admit one request for the duration of the block. It never waits. Where the limits are
        reached, a tenant that holds less than its share of them may exceed them.

        Args:
            tenant: whom it counts for.
            resumed: another replica began the answer. The request keeps the slot that it had in
                that replica's queue: no more of them come than another replica had.

        Raises:
            DrainingError, OverloadedError, EngineClosedError: the request is refused.
        """
        self._refuse_if_closed()
        if not resumed:
            self._refuse_if_full(tenant)
        try:
            with self.requests.counted(tenant):
                yield
        finally:
            if not self.requests.num_open:
                self.on_idle()

    def _refuse_if_closed(self) -> None:
        if self.requests.draining:
            raise DrainingError("the server is shutting down", code="shutting_down")
        if not self._engine.alive:
            raise EngineClosedError("the engine has stopped", code="engine_stopped")

    @contextlib.contextmanager
    def holding_tokens(self, tenant: Tenant, tokens: int) -> Iterator[None]:
        """Count the tokens of a prompt as open inside the block."""
        self.open_tokens += tokens
        self.tokens_of.add(tenant, tokens)
        try:
            yield
        finally:
            self.open_tokens -= tokens
            self.tokens_of.add(tenant, -tokens)

    def _refuse_if_full(self, tenant: Tenant) -> None:
        limit = self._engine.config.max_num_seqs + self._config.max_queued_requests
        self.requests.refuse_if_full(tenant, limit)
        most = self._config.max_queued_tokens
        if not self.tokens_of.may_add(tenant, self.open_tokens, most):
            raise OverloadedError(f"{most} prompt tokens are open already", code="queue_full")


class OpenRequests:
    """Counter of open requests. It is used on the event loop only.

    Attributes:
        draining: the server takes no new work.
        num_open: requests that were admitted and have not ended.
        on_drain: called when the server begins to wait for them.
        may_end: returns False while none of them gets on, so that nobody waits for them.
    """

    def __init__(self) -> None:
        self.draining = False
        self.num_open = 0
        self.on_drain: Callable[[], None] = lambda: None
        self.may_end: Callable[[], bool] = lambda: True
        self._all_done = asyncio.Event()
        self._places = Places()

    def refuse_if_full(self, tenant: Tenant, limit: int) -> None:
        """Raise OverloadedError if as many requests as allowed are open, unless the tenant has less
        than its share of them."""
        if not self._places.may_add(tenant, self.num_open, limit):
            raise OverloadedError(f"{self.num_open} requests are open already", code="queue_full")

    @contextlib.contextmanager
    def counted(self, tenant: Tenant) -> Iterator[None]:
        """Count one request as open inside the block."""
        self.num_open += 1
        self._places.add(tenant, 1)
        try:
            yield
        finally:
            self.num_open -= 1
            self._places.add(tenant, -1)
            if not self.num_open:
                self._all_done.set()

    async def drain(self, timeout: float) -> bool:
        """Stop taking new work and wait for open requests; return True if all ended in time."""
        self.draining = True
        self.on_drain()
        deadline = time.monotonic() + timeout
        while self.num_open and self.may_end() and (left := deadline - time.monotonic()) > 0:
            self._all_done.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_done.wait(), left)
        return not self.num_open
