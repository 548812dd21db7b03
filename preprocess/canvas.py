"""Positions on a canvas: the slices of a picture lie side by side, under the whole picture.

The whole picture is much smaller and is stretched over all of its slices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from vlm_serve.preprocess.media_process import Slices
from vlm_serve.preprocess.prompt import MediaSpan


@dataclass(frozen=True, slots=True)
class _Picture:
    """A whole picture and its slices; `layout` is None if it has none."""

    whole: MediaSpan
    slices: Sequence[MediaSpan]
    layout: Slices | None

    @property
    def start(self) -> int:
        """Index of the marker before the picture."""
        return self.whole.start - 1

    @property
    def columns(self) -> int:
        return 1 if self.layout is None else self.layout.columns

    @property
    def canvas(self) -> tuple[int, int]:
        """(height, width) in tokens."""
        if self.layout is None:
            return _tokens(self.whole)
        height, width = _tokens(self.slices[0])
        return self.layout.rows * height, self.layout.columns * width


def canvas_positions(
    token_ids: Sequence[int],
    spans: Sequence[MediaSpan],
    layouts: Sequence[Slices | None],
    markers: Collection[int],
) -> tuple[torch.Tensor, int]:
    """Compute the positions of every token on the three axes, and the offset of generated tokens.

    Follows transformers' `MiniCPMV4_7Model.get_rope_index`. Text counts up on all axes alike. A
    picture takes one step in time and advances the count by the longer side of its canvas. Markers
    around its parts lie at their corners. Markers and line breaks right after a picture lie at its
    origin.

    Args:
        layouts: how the pictures of each medium are cut.
        markers: the tokens around pictures and slices, and the line break.

    Returns:
        int64 `[3, length]`, and the highest position plus one minus the length.
    """
    length = len(token_ids)
    positions = torch.empty((3, length), dtype=torch.int64)
    at, position = 0, 0
    for picture in _pictures(spans, layouts):
        if picture.start > at:
            text = picture.start - at
            positions[:, at : picture.start] = torch.arange(position, position + text)
            position += text
        at = (picture.slices or [picture.whole])[-1].end
        while at < length and token_ids[at] in markers:
            at += 1
        _place(positions[:, :at], picture, position)
        position += max(picture.canvas) + 1
    positions[:, at:] = torch.arange(position, position + length - at)
    delta = int(positions.max()) + 1 - length if length else 0
    return positions, delta


def _pictures(spans: Sequence[MediaSpan], layouts: Sequence[Slices | None]) -> Iterator[_Picture]:
    at = 0
    while at < len(spans):
        layout = layouts[spans[at].item]
        end = at + 1 + (0 if layout is None else layout.count)
        yield _Picture(spans[at], spans[at + 1 : end], layout)
        at = end


def _place(positions: torch.Tensor, picture: _Picture, origin: int) -> None:
    """Fill in the positions of a picture, from the marker before it to the end."""
    (height, width), whole = picture.canvas, picture.whole
    positions[:, picture.start :] = origin
    positions[1:, picture.start] = max(origin - 1, 0)
    _put(positions, whole.end, origin + height, origin + width)
    _spread(positions, whole, origin, (0, 0), (height, width))
    for index, span in enumerate(picture.slices):
        row, column = divmod(index, picture.columns)
        rows, columns = _tokens(span)
        top, left = row * rows, column * columns
        _put(positions, span.start - 1, origin + top, origin + left)
        _put(positions, span.end, origin + top + rows - 1, origin + left + columns - 1)
        _spread(positions, span, origin, (top, left), (rows, columns))
        if column == picture.columns - 1 and index + 1 < len(picture.slices):
            for place in range(span.end + 1, picture.slices[index + 1].start - 1):
                _put(positions, place, origin + top + rows - 1, origin + width)


def _put(positions: torch.Tensor, place: int, row: int, column: int) -> None:
    if place < positions.shape[1]:
        positions[1, place], positions[2, place] = row, column


def _spread(
    positions: torch.Tensor,
    span: MediaSpan,
    origin: int,
    corner: tuple[int, int],
    size: tuple[int, int],
) -> None:
    """Spread a span's tokens over an area of the canvas."""
    rows, columns = _tokens(span)
    block = positions[:, span.start : span.end].view(3, rows, columns)
    down, right = (
        torch.linspace(0, over - 1, count).round().long() + first + origin
        for over, count, first in zip(size, (rows, columns), corner, strict=True)
    )
    block[0], block[1], block[2] = origin, down[:, None], right


def _tokens(span: MediaSpan) -> tuple[int, int]:
    return span.grid[1] // span.merge_size, span.grid[2] // span.merge_size
