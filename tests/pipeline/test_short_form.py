"""The short form of a question: what it takes, and which names are videos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vlm_serve.errors import InvalidRequestError
from vlm_serve.pipeline.requests import messages_of


@pytest.mark.parametrize("wrong", [("alone",), ("a", "b", "c"), 5, None, (b"a", "b"), {"a": 1}])
def test_the_short_form_is_explained(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="the short form is text, "):
        messages_of(wrong)


@pytest.mark.parametrize("name", ["a.mp4", "b.WMV", "c.flv", "d.mpeg", Path("e.mpg"), "f.m2ts?x=1"])
def test_names_of_videos_make_videos(name: str | Path) -> None:
    """Every container that docs/video.md names is a video by its usual suffix."""
    assert messages_of(("What happens?", name))[0]["content"][0] == {"type": "video", "video": name}
