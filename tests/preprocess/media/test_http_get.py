"""Which URLs and addresses are fit to be dialled."""

from __future__ import annotations

import ipaddress
from dataclasses import replace

import pytest

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.media.fetch import fetch, is_public, parse_target
from vlm_serve.preprocess.media.limits import MediaLimits

LIMITS = MediaLimits()


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.0.0.1",
        "172.16.3.4",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "198.18.0.1",
        "192.0.0.192",
        "192.0.0.9",
        "192.0.2.1",
        "192.88.99.1",
        "203.0.113.7",
        "240.0.0.1",
        "::1",
        "::",
        "fe80::1",
        "fc00::1",
        "fec0::1",
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "2002:a00:1::1",
        "2001:db8::1",
        "2001::8.8.8.8",
        "3fff::1",
        "5f00::1",
        "64:ff9b:1::808:808",
        "64:ff9b::c000:c0",
        "100::1",
        "4000::1",
    ],
)
def test_private_and_odd_addresses(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


def test_the_table_of_python_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older ones call 192.0.0.192 global, where a cloud serves credentials."""
    for kind in (ipaddress.IPv4Address, ipaddress.IPv6Address):
        monkeypatch.setattr(kind, "is_global", True)
    for address in ("192.0.0.192", "10.0.0.1", "fd00::1"):
        assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8",
        "1.1.1.1",
        "2606:4700:4700::1111",
        "64:ff9b::808:808",
        "192.0.1.1",
        "2002:808:808::1",
    ],
)
def test_public_addresses(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "cat.png",
        "/etc/passwd",
        "ftp://example.com/x",
        "gopher://example.com/x",
        "javascript:1",
        "http://",
        "http:///x",
        "http://exa mple.com/",
        "http://example.com:99999/",
        "http://example.com:x/",
        "http://user:secret@example.com/",
        "http://user@127.0.0.1/",
        "http://example.com\\@127.0.0.1/",
        "http://[::1/",
        "http://exa\nmple.com/",
        "http://ex%61mple%2f.com/",
        "https://" + "a" * 10_000,
        "http://\udcff/",
    ],
)
def test_malformed_urls(url: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        fetch(url, max_bytes=100, limits=LIMITS)
    assert caught.value.status == 400
    assert "secret" not in caught.value.message


def test_parts_of_a_url() -> None:
    target = parse_target("HTTP://Example.COM:8080/a b?c=%20d&e=é#frag", LIMITS)
    assert (target.host, target.port, target.secure) == ("example.com", 8080, False)
    assert target.path == "/a%20b?c=%20d&e=%C3%A9"
    assert target.host_header == "example.com:8080"
    target = parse_target("https://[2606:4700::1]", LIMITS)
    assert (target.host, target.port, target.path) == ("2606:4700::1", 443, "/")
    assert target.host_header == "[2606:4700::1]"
    assert parse_target("http://bücher.example/", LIMITS).host == "xn--bcher-kva.example"


def test_allowed_hosts() -> None:
    limits = replace(LIMITS, allowed_media_domains=("Images.example",))
    assert parse_target("http://images.example./x", limits).host == "images.example."
    for url in ("http://example/", "http://evil-images.example/", "http://images.example.evil/"):
        with pytest.raises(InvalidRequestError, match="allowed hosts"):
            parse_target(url, limits)
