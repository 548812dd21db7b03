"""Checkpoints in published layouts, each written once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import published_layouts
import published_templates
import pytest

Written = Callable[[str], Path]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The checkpoint of a layout, with a template that keeps thoughts."""
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            layout = published_layouts.LAYOUTS[name]
            source = "keeps thoughts" if layout.spec.vision_depth else "wants strings"
            template = published_templates.OWN[source]
            if layout.spec.sliced:
                template = published_templates.bare(template)
            made[name] = published_layouts.write_layout(
                tmp_path_factory.mktemp("published") / "checkpoint", layout, template
            )
        return made[name]

    return of
