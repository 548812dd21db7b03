"""Protection against other websites: checks of the Host header, and CORS.

Any website can make a browser send requests to this server. Both checks come before the API key,
since browsers send no key with a preflight request.
"""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.errors import PermissionDeniedError, error_for
from vlm_serve.server.http.request_id import request_id_of
from vlm_serve.system.hosts import is_loopback


def refuse_foreign_scripts(scope: Scope, config: ServerConfig) -> None:
    """Refuse a request that a script of another site has sent.

    Routes that change something and read no JSON need this: browsers send such requests without
    asking for permission.

    Raises:
        PermissionDeniedError: the request's origin is neither this server nor an allowed one.
    """
    headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
    origin = headers.get(b"origin")
    if origin is None or {"*", origin} & {*config.allowed_origins}:
        return
    if origin.partition("://")[2] != headers.get(b"host"):
        raise PermissionDeniedError(
            "pages of other websites may not do that; --allowed-origins names exceptions",
            code="origin_not_allowed",
        )


def for_browsers(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """Return the application behind the configured checks of hosts and origins."""
    if config.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
        )
    # No browser reaches a Unix socket; a proxy before it knows its own names.
    if config.allowed_hosts or (config.uds is None and is_local_name(config.host)):
        app = HostCheck(app, config.allowed_hosts)
    return app


def is_unguarded(config: ServerConfig) -> bool:
    """Return True if anybody with access to an address beyond loopback may ask without a key."""
    has_keys = bool(config.api_key) or config.tenant_keys is not None
    return not has_keys and config.uds is None and not is_local_name(config.host)


def is_local_name(name: str) -> bool:
    """Return True if a host name or address means the local machine to a browser."""
    name = name.lower().removesuffix(".")
    return name.endswith(".localhost") or is_loopback(name)


def host_name(header: str) -> str:
    """Return the name in a Host header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


class HostCheck:
    """ASGI layer for refusing requests with a Host other than loopback and the allowed names.

    This stops DNS rebinding: a website whose name resolves to 127.0.0.1 would share the server's
    origin, and its scripts could do whatever the page may. Browsers always send the website's name.

    Args:
        app: the application behind it.
        allowed: further names, without ports; `*` allows all.
    """

    def __init__(self, app: ASGIApp, allowed: tuple[str, ...]) -> None:
        self._app = app
        self._all = "*" in allowed
        self._allowed = frozenset(name.lower().removesuffix(".") for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._all or self._is_ours(scope):
            await self._app(scope, receive, send)
            return
        refusal = PermissionDeniedError(
            "this server does not answer for that Host; --allowed-hosts names further ones",
            code="host_not_allowed",
        )
        response = error_for(scope, refusal)
        response.headers["x-request-id"] = request_id_of(scope)
        await response(scope, receive, send)

    def _is_ours(self, scope: Scope) -> bool:
        """Return True if the Host is allowed, or missing; browsers always send exactly one."""
        for name, value in scope["headers"]:
            if name == b"host":
                host = host_name(value.decode("latin-1")).lower().removesuffix(".")
                return host in self._allowed or is_local_name(host)
        return True
