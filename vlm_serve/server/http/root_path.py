"""Serving below a path: for a proxy that passes its own prefix on."""

from __future__ import annotations

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class BelowRoot:
    """ASGI layer that takes a prefix off the paths of requests; paths without it pass as they are.

    Args:
        app: the application behind it.
        root: the prefix, such as /vlm.
    """

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app = app
        self._root = root
        self._raw = root.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw: bytes = scope.get("raw_path", b"") if scope["type"] == "http" else b""
        if raw == self._raw and scope["method"] in ("GET", "HEAD"):
            # The page's requests are relative, so its own path must end with a slash.
            await RedirectResponse(self._root + "/")(scope, receive, send)
            return
        if raw.startswith(self._raw + b"/"):
            path: str = scope["path"].removeprefix(self._root)
            scope = {**scope, "path": path, "raw_path": raw.removeprefix(self._raw)}
        await self._app(scope, receive, send)
