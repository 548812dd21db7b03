"""The files of the page: a fixed table, safe headers, no key."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine
from serving import RunningServer, running

from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http import static_page

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob: data:; media-src blob:; font-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify page"
)
FILES = {
    "index.html": ("<!doctype html><title>ü</title>", "text/html; charset=utf-8"),
    "app.js": ("export {};", "text/javascript; charset=utf-8"),
    "style.css": ("body {}", "text/css; charset=utf-8"),
    "vendor/LICENSE.txt": ("MIT", "text/plain; charset=utf-8"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    page = tmp_path / "page"
    for name, (text, _) in FILES.items():
        (page / name).parent.mkdir(parents=True, exist_ok=True)
        (page / name).write_text(text, encoding="utf-8")
    (page / "notes.md").write_text("not served", encoding="utf-8")
    (tmp_path / "secret.txt").write_text("secret", encoding="utf-8")
    (page / "link.txt").symlink_to(tmp_path / "secret.txt")
    monkeypatch.setattr(static_page, "PAGE_FOLDER", page)
    return page


@pytest.fixture
def server(tokenizer: Tokenizer, folder: Path) -> Iterator[RunningServer]:
    with running(FakeEngine(tokenizer), ServerConfig(port=0, api_key=("secret",))) as server:
        yield server


def test_every_file_is_there_without_a_key(server: RunningServer) -> None:
    for name, (text, content_type) in FILES.items():
        for path in (f"/{name}", "/") if name == "index.html" else (f"/{name}",):
            got = server.client.get(path)
            assert (got.status_code, got.text) == (200, text)
            assert got.headers["content-type"] == content_type
            assert got.headers["content-security-policy"] == POLICY
            assert got.headers["x-content-type-options"] == "nosniff"
            assert got.headers["referrer-policy"] == "no-referrer"
            assert got.headers["cross-origin-opener-policy"] == "same-origin"
            assert got.headers["x-request-id"]
            head = server.client.head(path)
            assert (head.status_code, head.text) == (200, "")
            assert head.headers["content-length"] == str(len(text.encode()))


def test_a_browser_that_has_a_file_is_told_so(server: RunningServer) -> None:
    tag = server.client.get("/app.js").headers["etag"]
    for given in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        got = server.client.get("/app.js", headers={"If-None-Match": given})
        assert (got.status_code, got.text, got.headers["etag"]) == (304, "", tag)
        assert got.headers["content-security-policy"] == POLICY
    assert server.client.get("/app.js", headers={"If-None-Match": '"other"'}).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/notes.md", "/link.txt", "/vendor", "/vendor/", "/../secret.txt", "/%2e%2e/secret.txt",
     "//app.js", "/app.js/", "/APP.JS", "/app%2ejs", "/v1/models"],
)  # fmt: skip
def test_nothing_else_is(server: RunningServer, path: str) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    # As it is written here: httpx would resolve the dots itself.
    with httpx.Client(timeout=60, trust_env=False) as client:
        url = httpx.URL(scheme="http", host=host, port=int(port), raw_path=path.encode())
        assert client.get(url).status_code == 401


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_files_are_only_read(server: RunningServer, method: str) -> None:
    answer = server.client.request(method, "/app.js")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


def test_files_are_read_once(server: RunningServer, folder: Path) -> None:
    (folder / "app.js").write_text("changed", encoding="utf-8")
    assert server.client.get("/app.js").text == FILES["app.js"][0]


def test_there_is_a_server_without_a_page(tokenizer: Tokenizer, folder: Path) -> None:
    with running(FakeEngine(tokenizer), ServerConfig(port=0, page=False)) as server:
        assert server.client.get("/").status_code == 404
        assert server.client.get("/app.js").status_code == 404
