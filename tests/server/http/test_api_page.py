"""The page at /docs: it shows every route, and needs neither a script nor a network."""

from __future__ import annotations

import re
from typing import Any

import pytest
from serving import RunningServer, ok

from vlm_serve.server.http.api_page import render


def test_every_route_and_field_is_on_the_page(fake: RunningServer) -> None:
    document = ok(fake.client.get("/openapi.json"))
    answer = fake.client.get("/docs")
    page = answer.text
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path, item in document["paths"].items():
        for method in item:
            assert f"<code>{method.upper()} {path}</code>" in page
    assert "<code>max_completion_tokens</code>" in page and "<code>messages</code>" in page
    assert "<script" not in page and re.findall(r'(?:href|src)="([^"]+)"', page) == ["openapi.json"]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": 5}, "integer or null, de"),
        ({"type": "array", "items": {"$ref": "#/components/schemas/Part"}}, "list of Part"),
        ({"enum": ["a", "b"]}, "a or b"),
        ({}, "any"),
        ({"type": "string", "description": "<b>"}, "&lt;b&gt;"),
    ],
)
def test_types_are_words(schema: dict[str, Any], said: str) -> None:
    body = {"content": {"application/json": {"schema": {"properties": {"x": schema}}}}}
    document = {
        "info": {"title": "t", "version": "1"},
        "paths": {"/x": {"post": {"summary": "s", "requestBody": body}}},
    }
    assert said in render(document)
