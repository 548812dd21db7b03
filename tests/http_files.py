"""A server of files on the loopback address, for tests that fetch."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterator
from typing import Any

Handler = Callable[[http.server.BaseHTTPRequestHandler], None]


@contextlib.contextmanager
def serving(handle: Handler) -> Iterator[str]:
    """An HTTP server on the loopback address; yields its root URL without a final slash."""

    class Requests(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with contextlib.suppress(OSError):
                handle(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Requests)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
