"""What the gateway does with replicas that answer, break off or are not there."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, cast

import httpx
import pytest
from starlette.types import Message

from vlm_serve.deploy.gateway import Gateway
from vlm_serve.deploy.replica_pool import (
    BrokenAnswerError,
    ReplicaCall,
    ReplicaLostError,
    ReplicaPool,
)
from vlm_serve.engine.requests.tenant import NOBODY, Tenant
from vlm_serve.errors import InvalidRequestError
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.failover.attempt import PING
from vlm_serve.server.http.auth import guarded
from vlm_serve.server.http.errors import error_for
from vlm_serve.server.http.tenants import TenantKey, tenant_of

START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream")],
}


def body(data: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


WHOLE = [START, body(b"data: 1\n\n"), body(b"data: [DONE]\n\n", more=False)]


class ScriptedPool:
    """Replicas that say what they are told to; an exception ends what one of them says."""

    def __init__(self, *scripts: list[Message | Exception]) -> None:
        self.names: tuple[str, ...] = ("r1", "r2")
        self.calls: list[ReplicaCall] = []
        self._scripts = list(scripts)

    async def run(self) -> None:
        pass

    async def answers(self, call: ReplicaCall) -> AsyncGenerator[Message, None]:
        self.calls.append(call)
        for each in self._scripts.pop(0):
            if isinstance(each, Exception):
                raise each
            yield each


def gateway_of(pool: ScriptedPool, **options: Any) -> Gateway:
    return Gateway(cast(ReplicaPool, pool), ServerConfig(page=False, **options), "demo", 1)


async def post(
    gateway: Gateway, path: str = "/v1/chat/completions", **fields: Any
) -> httpx.Response:
    transport = httpx.ASGITransport(
        cast(Any, guarded(gateway, gateway.config, {"tenant-key": TenantKey("mine", 3)})),
        raise_app_exceptions=False,
    )
    headers = {"authorization": "Bearer tenant-key", **fields.pop("headers", {})}
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await client.post(path, json={"messages": []}, headers=headers, **fields)


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await work()

    asyncio.run(whole())


def test_an_answer_passes_as_it_is() -> None:
    async def work() -> None:
        pool = ScriptedPool([*WHOLE])
        answer = await post(gateway_of(pool))
        assert answer.status_code == 200
        assert answer.text == "data: 1\n\ndata: [DONE]\n\n"

    run(work)


def test_what_the_gate_knows_travels_beside_the_headers() -> None:
    async def work() -> None:
        pool = ScriptedPool([*WHOLE])
        await post(gateway_of(pool), headers={"tenant_salt": "other", "x-request-id": "mine"})
        scope = pool.calls[0].scope
        assert scope["state"]["tenant_salt"] == "mine"
        assert scope["state"]["request_id"] == "mine"
        assert tenant_of(pickle.loads(pickle.dumps(scope))) == Tenant("tenant 1", 3, "tenant 1")
        names = [name for name, _ in scope["headers"]]
        assert b"authorization" not in names and b"content-type" in names
        assert pool.calls[0].body == b'{"messages":[]}'

    run(work)


def test_a_request_that_has_not_begun_goes_to_another_replica() -> None:
    async def work() -> None:
        pool = ScriptedPool([ReplicaLostError("r1")], [*WHOLE])
        gateway = gateway_of(pool)
        assert (await post(gateway)).text.endswith("[DONE]\n\n")
        assert pool.calls[0].avoid == () and pool.calls[1].avoid == ("r1",)
        assert gateway.num_lost == 1

    run(work)


def test_a_request_that_nobody_has_begun_is_sent_again_once() -> None:
    async def work() -> None:
        nobody = ReplicaLostError(None)
        pool = ScriptedPool([nobody], [*WHOLE])
        assert (await post(gateway_of(pool))).status_code == 200
        pool = ScriptedPool([nobody], [nobody], [*WHOLE])
        assert (await post(gateway_of(pool))).status_code == 503 and len(pool.calls) == 2

    run(work)


def test_a_third_replica_is_never_asked() -> None:
    async def work() -> None:
        pool = ScriptedPool([ReplicaLostError("r1")], [ReplicaLostError("r2")], [*WHOLE])
        answer = await post(gateway_of(pool))
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "replica_lost"
        assert len(pool.calls) == 2

    run(work)


def test_replicas_that_end_in_order_are_no_deaths() -> None:
    async def work() -> None:
        left = [ReplicaLostError(name, died=False) for name in ("r1", "r2")]
        begun = [START, body(b"data: 1\n\n")]
        pool = ScriptedPool([*begun, left[0]], [left[1]], [ReplicaLostError("r3")], [*WHOLE[2:]])
        answer = await post(gateway_of(pool))
        assert answer.text == "data: 1\n\ndata: [DONE]\n\n"
        attempts = [call.attempt for call in pool.calls]
        assert [each.resumed for each in attempts] == [0, 1, 2, 3]
        assert [each.deaths for each in attempts] == [0, 0, 0, 1]
        assert [each.delivered for each in attempts] == [0, 9, 9, 9]
        assert pool.calls[-1].avoid == ("r1", "r2", "r3")

    run(work)


def test_an_answer_does_not_go_on_under_other_weights() -> None:
    """An answer that was only begun does, since nothing of it was delivered."""

    async def work() -> None:
        for begun, calls in ([START, body(b"data: 1\n\n")], 1), ([START], 2):
            pool = ScriptedPool([*begun, ReplicaLostError("r1")], [*WHOLE[1:]])
            gateway = gateway_of(pool)
            whole = pool.answers

            async def swapped(
                call: ReplicaCall, whole: Any = whole, orders: Any = gateway.orders
            ) -> AsyncGenerator[Message, None]:
                orders.changes += 2
                async for message in whole(call):
                    yield message

            pool.answers = swapped  # type: ignore[method-assign]
            answer = await post(gateway)
            assert len(pool.calls) == calls
            assert ("weights_changed" in answer.text) == (calls == 1)

    run(work)


def test_a_request_that_makes_a_replica_fail_is_not_sent_to_another() -> None:
    async def work() -> None:
        pool = ScriptedPool([BrokenAnswerError("it failed")], [*WHOLE])
        answer = await post(gateway_of(pool))
        assert answer.status_code == 500 and len(pool.calls) == 1

    run(work)


@pytest.mark.parametrize(
    ("path", "begin"),
    [("/v1/chat/completions", 'data: {"error"'), ("/v1/messages", "event: error\ndata: ")],
)
def test_a_stream_that_breaks_off_ends_with_an_error_event(path: str, begin: str) -> None:
    async def work() -> None:
        broken = BrokenAnswerError("it failed")
        pool = ScriptedPool([START, body(b"data: 1\n\n"), broken])
        answer = await post(gateway_of(pool), path)
        first, last = answer.text.split("\n\n", 1)
        assert answer.status_code == 200 and first == "data: 1"
        assert last.startswith(begin)
        assert json.loads(last.split("data: ")[1])["error"]["message"]

    run(work)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_replica_that_is_lost_in_silence_is_replaced(path: str) -> None:
    """The client has the status and comments, which are no part of the answer. What another replica
    says of the request instead of an answer is an event in the API's form."""

    async def work() -> None:
        ping: Message = {**body(b": waiting\n\n"), PING: True}
        lost = ReplicaLostError("r1")
        pool = ScriptedPool([START, ping, ping, lost], [*WHOLE[1:]])
        answer = await post(gateway_of(pool), path)
        assert answer.text == ": waiting\n\n" * 2 + "data: 1\n\ndata: [DONE]\n\n"
        attempt = pool.calls[1].attempt
        assert attempt.started and attempt.delivered == 0 and attempt.deaths == 1
        told = InvalidRequestError("too long", code="context_length_exceeded")
        refused = error_for({"path": path, "headers": []}, told)
        refusal: list[Message | Exception] = [
            {"type": "http.response.start", "status": 400, "headers": []}
        ]
        refusal.append(body(bytes(refused.body), more=False))
        pool = ScriptedPool([START, ping, lost], refusal)
        answer = await post(gateway_of(pool), path)
        assert answer.status_code == 200
        (event,) = parse(answer.text.removeprefix(": waiting\n\n"))
        named = {} if path == "/v1/chat/completions" else {"event": "error"}
        assert {key: event[key] for key in event if key != "data"} == named
        about = event["data"] if path == "/v1/responses" else event["data"]["error"]
        assert about["message"] == "too long"

    run(work)


def parse(text: str) -> list[dict[str, Any]]:
    found = []
    for each in text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in each.split("\n"))
        found.append(lines | {"data": json.loads(lines["data"])})
    return found


def test_the_limit_of_open_requests_is_the_gateways() -> None:
    async def work() -> None:
        gateway = gateway_of(ScriptedPool([*WHOLE]))
        own = Tenant("tenant 1", 3)
        with gateway.requests.counted(own), gateway.requests.counted(own):  # one for each replica
            answer = await post(gateway)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "queue_full"
        with gateway.requests.counted(NOBODY), gateway.requests.counted(NOBODY):
            assert (await post(gateway)).status_code == 200, "another tenant has a share of them"

    run(work)


def test_without_replicas_nobody_waits() -> None:
    async def work() -> None:
        pool = ScriptedPool()
        pool.names = ()
        answer = await post(gateway_of(pool))
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_replica"
        assert answer.headers["retry-after"]

    run(work)


def test_too_large_a_body_reaches_no_replica() -> None:
    async def work() -> None:
        pool = ScriptedPool()
        answer = await post(gateway_of(pool, max_body_size=10))
        assert answer.status_code == 413 and not pool.calls

    run(work)


def test_a_draining_gateway_takes_no_more() -> None:
    async def work() -> None:
        pool = ScriptedPool()
        gateway = gateway_of(pool)
        assert await gateway.requests.drain(1.0)
        assert (await post(gateway)).json()["error"]["code"] == "shutting_down"

    run(work)


def test_a_question_about_one_replica_names_it_in_the_query() -> None:
    async def work() -> None:
        pool = ScriptedPool([*WHOLE], [*WHOLE])
        gateway = gateway_of(pool)
        await post(gateway, "/v1/cache/probe?replica=r2&x=1")
        assert pool.calls[0].replica == "r2" and pool.calls[0].scope["query_string"] == b"x=1"
        await post(gateway, "/v1/cache/probe")
        assert pool.calls[1].replica is None
        unknown = await post(gateway, "/v1/cache/probe?replica=r3")
        assert unknown.status_code == 404 and unknown.json()["error"]["param"] == "replica"

    run(work)
