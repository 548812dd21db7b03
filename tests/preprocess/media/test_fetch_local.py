"""data: and file:// URLs: what is read and all that is refused."""

from __future__ import annotations

import base64
import os
from dataclasses import replace
from pathlib import Path

import pytest

from vlm_serve.errors import InvalidRequestError, MediaError, MediaFetchError
from vlm_serve.preprocess.media.fetch import fetch, naming
from vlm_serve.preprocess.media.limits import MediaLimits

LIMITS = MediaLimits()
BODY = bytes(range(256)) * 20


def get(url: str, limits: MediaLimits = LIMITS, max_bytes: int = 10_000) -> bytes:
    with naming("where"):
        return fetch(url, max_bytes=max_bytes, limits=limits)


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png;base64," + base64.b64encode(BODY).decode(),
        "DATA:;base64," + base64.urlsafe_b64encode(BODY).decode().rstrip("="),
        "data:image/png;charset=x;BASE64," + base64.encodebytes(BODY).decode(),
        "data:image/png;base64," + base64.b64encode(BODY).decode().replace("+", "%2B"),
        "data:," + "".join(f"%{byte:02x}" for byte in BODY),
    ],
)
def test_data_urls(url: str) -> None:
    assert get(url) == BODY


@pytest.mark.parametrize(
    "url",
    ["data:", "data:image/png;base64", "data:;base64,a", "data:;base64,&&&&", "data:;base64,é"],
)
def test_malformed_data_urls(url: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        get(url)
    assert (caught.value.status, caught.value.param) == (400, "where")


def test_data_urls_are_bounded() -> None:
    for url in ("data:;base64," + base64.b64encode(BODY).decode(), "data:," + "a" * len(BODY)):
        assert len(get(url, max_bytes=len(BODY))) == len(BODY)
        with pytest.raises(MediaError, match="over"):
            get(url, max_bytes=len(BODY) - 1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "open" / "sub").mkdir(parents=True)
    (tmp_path / "open" / "sub" / "a b.png").write_bytes(BODY)
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "openly").mkdir()
    (tmp_path / "openly" / "x.png").write_bytes(b"secret")
    return tmp_path / "open"


def test_files_below_the_root(root: Path) -> None:
    limits = replace(LIMITS, allowed_local_media_path=root)
    (root / "inner.png").symlink_to(root / "sub" / "a b.png")
    for url in (
        f"file://{root}/sub/a%20b.png",
        f"file://localhost{root}/sub/a b.png",
        f"file://{root}/sub/../sub/a%20b.png",
        f"file://{root}/inner.png",
    ):
        assert get(url, limits) == BODY
    with pytest.raises(MediaError, match="over"):
        get(f"file://{root}/inner.png", limits, max_bytes=len(BODY) - 1)


def test_a_root_that_is_a_link(root: Path) -> None:
    (root.parent / "link").symlink_to(root)
    limits = replace(LIMITS, allowed_local_media_path=root.parent / "link")
    assert get(f"file://{root}/sub/a%20b.png", limits) == BODY


def test_everything_else_looks_like_a_missing_file(root: Path) -> None:
    limits = replace(LIMITS, allowed_local_media_path=root)
    (root / "out.png").symlink_to(root.parent / "secret.png")
    (root / "outside").symlink_to(root.parent)
    (root / "loop").symlink_to(root / "loop")
    os.mkfifo(root / "pipe")
    messages = set()
    for url in (
        f"file://{root}/missing.png",
        f"file://{root.parent}/secret.png",
        f"file://{root.parent}/openly/x.png",
        f"file://{root}/../secret.png",
        f"file://{root}/%2e%2e/secret.png",
        f"file://{root}/out.png",
        f"file://{root}/outside/secret.png",
        f"file://{root}/loop",
        f"file://{root}/pipe",
        f"file://{root}/sub",
        f"file://{root}",
        f"file://{root}/a%00b",
        f"file://{root}/" + "a" * 300,
        "file:///etc/passwd",
        "file:///dev/zero",
        "file:///proc/self/environ",
    ):
        with pytest.raises(MediaFetchError) as caught:
            get(url, limits)
        assert caught.value.status == 422
        messages.add(caught.value.message)
    assert len(messages) == 1
    assert str(root) not in messages.pop()


@pytest.mark.parametrize("url", ["file://host/etc/passwd", "file:relative", "file:", "file:///%ff"])
def test_malformed_file_urls(url: str, root: Path) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        get(url, replace(LIMITS, allowed_local_media_path=root))
    assert caught.value.status == 400


def test_files_are_off_by_default(root: Path) -> None:
    with pytest.raises(InvalidRequestError, match="not enabled"):
        get(f"file://{root}/sub/a%20b.png")


def test_a_missing_root_is_no_open_door(root: Path) -> None:
    limits = replace(LIMITS, allowed_local_media_path=root / "gone")
    with pytest.raises(MediaFetchError):
        get(f"file://{root}/sub/a%20b.png", limits)
