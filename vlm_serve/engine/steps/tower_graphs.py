"""Replays the vision tower over small pictures and frames from CUDA graphs.

A tower has many launches a layer. Over few patches each is short, and a host queues them more
slowly than a GPU runs them. A graph has room for a number of patches, whatever pictures they belong
to: the bounds of pictures lie in a table, and patches behind the last one are padding, to which
none attends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch

from vlm_serve.engine.steps.step_tables import (
    GraphDevice,
    HostRing,
    Step,
    StepTables,
    Table,
    largest_first,
)
from vlm_serve.kernels.linear.low_rank import AdapterChanges
from vlm_serve.kernels.segment_attention import ROWS, segment_tiles
from vlm_serve.models import Model, ModelSpec
from vlm_serve.options.config import EngineConfig

PATCHES = (256, 512, 1024, 2048, 4096)
"""Patches of the captured runs. Longer runs keep a GPU busy without graphs."""
PICTURES = 16
"""Pictures of a run that may have any size. Those of whole tiles of attention may be more."""


def patch_sizes(model: ModelSpec, config: EngineConfig) -> tuple[int, ...]:
    """Return the numbers of patches to capture, ascending: up to those of the tokens of a step.

    There are none without a tower or its fixed form. A batch-invariant engine has none either: its
    attention by ops sums in another order, and company would choose between the two.
    """
    vision = model.vision
    if vision is None or not vision.has_fixed_form or config.deterministic:
        return ()
    area = vision.merge_size**2
    most = config.max_num_batched_tokens * area
    # A run ends with a whole token.
    pairs = zip(PATCHES, (0, *PATCHES), strict=False)
    return tuple(size // area * area for size, less in pairs if less < most)


class TowerGraphs:
    """Runs the tower from captured graphs.

    Args:
        model: the model; its tower has a fixed form.
        sizes: numbers of patches, ascending, see `patch_sizes`.
        device: captures runs and copies their tables.
    """

    def __init__(self, model: Model, *, sizes: Sequence[int], device: GraphDevice) -> None:
        tower = model.fixed_tower(sizes[-1])
        assert tower is not None, "patch_sizes has none"
        self._tower, self._sizes, self._device = tower, tuple(sizes), device
        self._ring = HostRing(device)
        with torch.inference_mode(False):
            shape = sizes[-1] // tower.area, model.spec.embedding_width
            self._out = torch.zeros(shape, dtype=model.dtype, device=model.device)
        steps = largest_first(self._sizes, self._step, "pictures of {} patches")
        self._steps = dict(zip(self._sizes, steps, strict=True))

    @torch.inference_mode()
    def run(
        self,
        patches: torch.Tensor,
        grids: Sequence[tuple[int, int, int]],
        changes: AdapterChanges | None = None,
    ) -> list[torch.Tensor] | None:
        """Embed pictures from a graph; return None if none fits: for more patches than captured,
        more small pictures than tiles, or an adapter of the tower. The next run overwrites the
        results.

        Args:
            patches, grids, changes: see `Tower.encode`.
        """
        if not grids or (changes is not None and changes.tower):
            return None
        counts = [height * width for _, height, width in grids]
        tiles = segment_tiles(counts)
        size = self._find(sum(counts), len(tiles))
        if size is None:
            return None
        tables, step = self._steps[size]
        self._tower.fill(patches, grids)
        self._fill(tables, tiles)
        step()
        rows = [count // self._tower.area for count in counts]
        return list(self._out[: sum(rows)].split_with_sizes(rows))

    def _find(self, patches: int, tiles: int) -> int | None:
        """Return the smallest size with room for these; None if there is none."""
        fitting = self._sizes[bisect_left(self._sizes, patches) :]
        return next((size for size in fitting if tiles <= most_tiles(size)), None)

    def _fill(self, tables: StepTables, tiles: Sequence[tuple[int, int, int]]) -> None:
        table = tables.stage()["tiles"]["tiles"]
        if tiles:
            table[: len(tiles)] = torch.tensor(tiles, dtype=torch.int32)
        tables.send()

    def _step(self, size: int) -> tuple[StepTables, Step]:
        """Capture a run of so many patches."""
        shapes = {"tiles": {"tiles": Table(torch.int32, (most_tiles(size), 3))}}
        tables = StepTables(shapes, self._ring, self._out.device)
        self._fill(tables, ())
        tiles = tables.fixed["tiles"]["tiles"]

        def step() -> None:
            rows = self._tower.run(size, tiles)
            self._out[: len(rows)].copy_(rows)

        return tables, self._device.capture(step)


def most_tiles(size: int) -> int:
    """Return the tiles of a run of so many patches: each picture may have one that is not full."""
    return size // ROWS + PICTURES
