"""The files of the page at `/`: a fixed table, read once when the server starts.

Requests never touch the file system, so no path can lead out of the folder. The files hold no
client's data, so they need no API key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from vlm_serve.errors import InvalidRequestError
from vlm_serve.server.http.errors import error_for

PAGE_FOLDER = Path(__file__).parent.parent / "page"
INDEX = "index.html"

CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".mp4": "video/mp4",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
"""Content type by suffix; other files of the folder are not served."""

TRUSTED_TYPES = ("dompurify", "page")
"""Trusted Types policies of the page: the sanitiser's, and one for the URLs of its workers."""

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' blob: data:",
        "media-src blob:",
        "font-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types " + " ".join(TRUSTED_TYPES),
    )
)

SAFETY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class StaticPage:
    """ASGI layer with the page's files below `/`, and the index at `/` too; it passes on all
    other requests.

    Args:
        app: the application behind it.

    Attributes:
        paths: raw paths of the files.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._files = _read(PAGE_FOLDER)
        self.paths = frozenset(self._files)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        file = self._files.get(scope.get("raw_path", b"")) if scope["type"] == "http" else None
        if file is None:
            await self._app(scope, receive, send)
        else:
            await file.response(scope)(scope, receive, send)


class _File:
    def __init__(self, path: Path) -> None:
        self._body = path.read_bytes()
        self._tag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'
        self._headers: Mapping[str, str] = {
            **SAFETY_HEADERS,
            "Content-Type": CONTENT_TYPES[path.suffix],
            "Cache-Control": "no-cache",
            "ETag": self._tag,
        }

    def response(self, scope: Scope) -> Response:
        """Return the file, or 304 if the browser has it."""
        if scope["method"] not in ("GET", "HEAD"):
            refusal = InvalidRequestError("this route has no such method")
            refusal.status = 405
            answer = error_for(scope, refusal)
            answer.headers["Allow"] = "GET, HEAD"
            return answer
        known = b",".join(value for name, value in scope["headers"] if name == b"if-none-match")
        tags = {tag.strip().removeprefix("W/") for tag in known.decode("latin-1").split(",")}
        if self._tag in tags or "*" in tags:
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, headers=self._headers)


def _read(folder: Path) -> dict[bytes, _File]:
    """Return {raw path: file} of a folder."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in CONTENT_TYPES and path.is_file() and not path.is_symlink():
            name = path.relative_to(folder).as_posix()
            file = files[f"/{name}".encode()] = _File(path)
            if name == INDEX:
                files[b"/"] = file
    return files
