"""Turns rendered text and media into token ids, media spans and M-RoPE positions.

Pictures seen in slices follow transformers' `MiniCPMV4_6Processor` and `MiniCPMV4_7Processor`:
`<image>` and the whole picture, then each of its slices, with a line break after every row of
slices but the last.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vlm_serve.errors import CheckpointError, InvalidRequestError
from vlm_serve.preprocess.identity.keys import hasher_of
from vlm_serve.preprocess.identity.prompt import MediaSpan
from vlm_serve.preprocess.known_prompts import Expansion, KnownPrompt, Names, Place
from vlm_serve.preprocess.media.loading import LoadedMedia
from vlm_serve.preprocess.media.media_processors import Processor
from vlm_serve.preprocess.media.processing import MediaRecord, Slices
from vlm_serve.preprocess.media.processors import SliceConfig, TileConfig
from vlm_serve.preprocess.reading.conversation import Modality
from vlm_serve.preprocess.text.family import Family
from vlm_serve.preprocess.text.known_pieces import Encoded
from vlm_serve.preprocess.text.rendering import PromptPiece, TypedText
from vlm_serve.preprocess.text.tokenizer import Tokenizer

EncodedPieces: TypeAlias = Sequence[tuple[PromptPiece, Encoded | None]]
"""Pieces of a prompt with the tokens of text; None for special tokens."""

_DOMAIN = b"vlm-serve picture on a canvas 1"
_MOST_RATE = 1000
"""Positions of a second of video, more than any model has."""
_TIMED_DOMAIN = b"vlm-serve temporal patch at a time 1"


@dataclass(frozen=True, slots=True)
class VisionTokens:
    """Ids of media placeholders and of the tokens around them; -1: the checkpoint has none."""

    image_pad: int = -1
    video_pad: int = -1
    vision_start: int = -1
    vision_end: int = -1

    def modality(self, token_id: int) -> Modality | None:
        """Return the modality of a placeholder, None for any other token."""
        if token_id == self.image_pad:
            return "image"
        return "video" if token_id == self.video_pad else None


class Expander:
    """Expands the placeholders of rendered prompts, as transformers' `Qwen3VLProcessor` does.

    Args:
        tokenizer: the checkpoint's.
        vision: the checkpoint's vision tokens.
    """

    joins_text: frozenset[Modality] = frozenset({"video"})
    """Media whose first timestamp is tokenised together with the text before it."""

    def __init__(self, tokenizer: Tokenizer, vision: VisionTokens) -> None:
        self._tokenizer = tokenizer
        self._vision = vision

    def positions(
        self, expansion: Expansion, known: KnownPrompt | None = None
    ) -> tuple[torch.Tensor, float]:
        """See `mrope_positions`."""
        return mrope_positions(len(expansion.token_ids), expansion.spans, known)

    def places(
        self, root: bytes, texts: EncodedPieces, media: Sequence[LoadedMedia]
    ) -> list[Place]:
        """Return the places of a prompt at which another one may continue it."""
        names, ids = Names(root), self._tokenizer.special_tokens
        left = iter(media)
        for piece, encoded in texts:
            if encoded is not None:
                names.add_text(encoded.digests)
                continue
            token_id = ids[piece.text]
            if self._vision.modality(token_id) is None:
                names.add_special(token_id, ends_turn=token_id in self._tokenizer.end_of_turn_ids)
            elif (medium := next(left, None)) is not None:
                names.add_medium(medium.record)
            else:
                break
        return names.places

    def expand(
        self,
        texts: EncodedPieces,
        typed: TypedText,
        media: Sequence[LoadedMedia],
        known: KnownPrompt | None = None,
    ) -> Expansion:
        """Expand a prompt's placeholders and join the tokens of its texts.

        Args:
            known: a prompt that this one continues.

        Raises InvalidRequestError unless the template placed exactly these media in this order.
        """
        out = Expansion() if known is None else known.expansion.until(known.place)
        first, item = (0, 0) if known is None else known.place[:2]
        text: tuple[PromptPiece, Encoded] | None = None
        for piece, encoded in texts[first:]:
            if encoded is not None:
                out.piece_starts.append(len(out.token_ids))
                text = piece, encoded
                continue
            token_id = self._tokenizer.special_tokens[piece.text]
            modality = self._vision.modality(token_id)
            if modality is None:
                self._add_piece(out, text)
                out.piece_starts.append(len(out.token_ids))
                out.token_ids.append(token_id)
                if token_id in self._tokenizer.end_of_turn_ids:
                    out.message_ends.append(len(out.token_ids))
            else:
                if item == len(media) or media[item].record.modality != modality:
                    raise _misplaced()
                before = ""
                if modality not in self.joins_text:
                    self._add_piece(out, text)
                elif text is not None:
                    before = typed.restore(text[0].text)
                out.piece_starts.append(len(out.token_ids))
                self._add_medium(out, before, media[item].record, item)
                out.records.append(media[item].record)
                out.media_ends.append(out.spans[-1].end)
                item += 1
            text = None
        self._add_piece(out, text)
        if item != len(media):
            raise _misplaced()
        return out

    @staticmethod
    def _add_piece(out: Expansion, text: tuple[PromptPiece, Encoded] | None) -> None:
        if text is not None:
            out.token_ids += text[1].ids

    def _add_text(self, out: Expansion, text: str) -> None:
        out.token_ids += self._tokenizer.encode_plain(text)

    def _add_span(self, out: Expansion, record: MediaRecord, item: int, patch: int) -> None:
        _, rows, columns = record.span(patch)
        start = len(out.token_ids)
        end = start + rows * columns // record.merge_size**2
        out.token_ids += [self._pad(record)] * (end - start)
        out.spans.append(
            MediaSpan(
                start=start,
                end=end,
                modality=record.modality,
                content_hash=self._identity(record, patch),
                grid=(1, rows, columns),
                item=item,
                patch=patch,
                merge_size=record.merge_size,
                pixels=record.hashes[patch],
                time=self._time(record, patch),
            )
        )

    def _pad(self, record: MediaRecord) -> int:
        """Return the token that stands for a part of a medium."""
        return self._vision.image_pad if record.modality == "image" else self._vision.video_pad

    def _time(self, record: MediaRecord, patch: int) -> float:
        """Return the positions between a video's first temporal patch and this one."""
        return 0

    def _identity(self, record: MediaRecord, patch: int) -> bytes:
        """Return the hash that, with a span's size, determines its tokens and positions."""
        return record.hashes[patch]

    def _add_medium(self, out: Expansion, text: str, record: MediaRecord, item: int) -> None:
        """Add a medium; of a video, `text` stands before its first timestamp."""
        if record.modality == "image":
            self._add_span(out, record, item, 0)
            return
        around = (self._vision.vision_start, self._vision.vision_end)
        for patch, seconds in enumerate(record.times):
            self._add_text(out, text + self._tokenizer.family.timestamp.format(seconds))
            text = ""
            self._add_between(out, around, record, item, patch)

    def _add_between(
        self, out: Expansion, around: tuple[int, int], record: MediaRecord, item: int, patch: int
    ) -> None:
        out.token_ids.append(around[0])
        self._add_span(out, record, item, patch)
        out.token_ids.append(around[1])


class TimedExpander(Expander):
    """An `Expander` for videos whose patches follow each other, as transformers'
    `Qwen2_5_VLProcessor` has them: positions tell the time.

    Args:
        tokenizer: the checkpoint's.
        vision: the checkpoint's vision tokens.
        rate: positions of a second; None: of a temporal patch there is one.
    """

    joins_text = frozenset()

    def __init__(self, tokenizer: Tokenizer, vision: VisionTokens, rate: float | None) -> None:
        super().__init__(tokenizer, vision)
        self._rate = rate
        self._fractions = tokenizer.family.positions == "seconds"

    def _add_medium(self, out: Expansion, text: str, record: MediaRecord, item: int) -> None:
        assert not text
        for patch in range(record.grid[0]):
            self._add_span(out, record, item, patch)

    def positions(
        self, expansion: Expansion, known: KnownPrompt | None = None
    ) -> tuple[torch.Tensor, float]:
        ids, spans = expansion.token_ids, expansion.spans
        return mrope_positions(len(ids), spans, known, fractions=self._fractions)

    def _time(self, record: MediaRecord, patch: int) -> float:
        if self._rate is None or not patch:
            return patch
        # In float32 and in this order, as the references round.
        place, rate, step = map(np.float32, (patch, self._rate, record.times[1]))
        return float(place * step * rate) if self._fractions else int(place * (rate * step))

    def _identity(self, record: MediaRecord, patch: int) -> bytes:
        """Return the content hash; behind a video's first patch, hash the time with it: the same
        frames at another rate have other positions."""
        time, known = self._time(record, patch), record.hashes[patch]
        named = time if isinstance(time, int) else time.hex()
        return hasher_of(_TIMED_DOMAIN, content=known, time=named).digest() if patch else known


def _misplaced() -> InvalidRequestError:
    return InvalidRequestError(
        "the chat template does not place the images and videos in the order of the messages",
        param="messages",
    )


def shared_tokens(
    encode: Callable[[str], list[int]],
    typed: TypedText,
    pieces: Sequence[PromptPiece],
    expansion: Expansion,
    other: Sequence[PromptPiece],
) -> int:
    """Count the leading tokens that a prompt shares with a second rendering.

    Args:
        encode: encodes text.
        pieces, expansion: the prompt.
        other: pieces of the second rendering, with the same media.
    """
    same = common_length(pieces, other)
    if same == len(pieces):
        return len(expansion.token_ids)
    start = expansion.piece_starts[same]
    if same == len(other) or pieces[same].is_special or other[same].is_special:
        return start
    # `start` precedes the text piece's tokens: they are added with the special token after it.
    mine, theirs = (encode(typed.restore(piece.text)) for piece in (pieces[same], other[same]))
    return start + common_length(mine, theirs)


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the number of leading items that two sequences share."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (mine, other) in pairs if mine != other), min(len(first), len(second)))


def _known_positions(positions: npt.NDArray[Any], known: KnownPrompt | None) -> tuple[int, Any]:
    """Copy known positions; return the number of tokens that have some, and the next position."""
    if known is None or known.positions is None:
        return 0, 0
    at = known.tokens
    positions[:, :at] = known.positions[:, :at].numpy()
    # An end of turn is text, which counts up on all axes alike.
    return at, positions[0, at - 1].item() + 1


def mrope_positions(
    length: int,
    spans: Sequence[MediaSpan],
    known: KnownPrompt | None = None,
    *,
    fractions: bool = False,
) -> tuple[torch.Tensor, float]:
    """Compute the positions of every token on the three axes, and the offset of generated tokens.

    Follows transformers' `Qwen3_5Model.get_rope_index` for a prompt whose videos are split at their
    temporal patches, and `Qwen2_5_VLModel.get_rope_index` for patches that follow each other: they
    begin where the first one does, and text goes on behind its longer side.

    Args:
        known: a prompt that this one continues.
        fractions: times may be fractions, and text goes on behind the last patch's time if that is
            later, as in `Qwen3OmniMoeThinkerForConditionalGeneration.get_rope_index`.

    Returns:
        int64 `[3, length]`, float64 with `fractions`, and the position of the next text token minus
        the length: as in transformers' `generate`, an answer has the positions that its text has in
        a prompt, also where a video's last patch is later than the text behind it.
    """
    # NumPy instead of torch: every torch operation releases the GIL, and on a busy server
    # reacquiring it takes longer than this whole function.
    positions = np.empty((3, length), dtype=np.float64 if fractions else np.int64)
    at, position = _known_positions(positions, known)
    origin = position
    for span in spans[bisect_left(spans, at, key=lambda span: span.start) :]:
        text = span.start - at
        positions[:, at : span.start] = position + np.arange(text)
        if text or not span.patch:
            origin = position = position + text
        rows, columns = span.grid[1] // span.merge_size, span.grid[2] // span.merge_size
        positions[0, span.start : span.end] = origin + span.time
        positions[1, span.start : span.end] = origin + np.arange(rows).repeat(columns)
        positions[2, span.start : span.end].reshape(rows, columns)[:] = origin + np.arange(columns)
        # As in the reference: take the longer side first, then divide by the merge size.
        position = origin + max(span.grid[1], span.grid[2]) // span.merge_size
        if fractions:
            position = max(position, origin + span.time + 1)
        at = span.end
    positions[:, at:] = position + np.arange(length - at)
    return torch.from_numpy(positions), position - at


@dataclass(frozen=True, slots=True)
class SliceTokens:
    """Ids of the tokens around slices and around picture numbers.

    `line` is the token of a line break on a canvas, if the checkpoint names one.
    """

    slice_start: int
    slice_end: int
    id_start: int
    id_end: int
    line: int | None


def _find_slice_tokens(tokenizer: Tokenizer, config: Mapping[str, Any]) -> SliceTokens:
    """Find the slice tokens of a checkpoint.

    Raises CheckpointError if one is not a special token, or config.json gives a different id.
    """
    family = tokenizer.family

    def find(name: str, usual: str | None) -> int:
        token = tokenizer.special_names.get(f"{name}_token", usual)
        token_id = None if token is None else tokenizer.special_tokens.get(token)
        if token_id is None:
            raise CheckpointError(f"{token!r} of the checkpoint is not a special token")
        given = config.get(f"{name}_id")
        if given not in (None, token_id):
            raise CheckpointError(f"{name}_id {given!r} in config.json is not {token!r}")
        return token_id

    line = config.get("newline_id")
    if family.positions == "canvas" and not isinstance(line, int):
        raise CheckpointError(f"newline_id in config.json must be a token's id, not {line!r}")
    return SliceTokens(
        slice_start=find("slice_start", family.slice_start),
        slice_end=find("slice_end", family.slice_end),
        id_start=find("image_id_start", family.id_start),
        id_end=find("image_id_end", family.id_end),
        line=line,
    )


class SliceExpander(Expander):
    """An `Expander` for pictures with slices.

    Args:
        tokenizer: the checkpoint's.
        vision, slices: the checkpoint's tokens.
        numbered: put numbers before pictures, for the media that the family numbers.
    """

    joins_text = frozenset()

    def __init__(
        self, tokenizer: Tokenizer, vision: VisionTokens, slices: SliceTokens, *, numbered: bool
    ) -> None:
        super().__init__(tokenizer, vision)
        self._slices = slices
        self._numbered = tokenizer.family.numbered if numbered else ()
        self._on_canvas = tokenizer.family.positions == "canvas"

    def positions(
        self, expansion: Expansion, known: KnownPrompt | None = None
    ) -> tuple[torch.Tensor, float]:
        if not self._on_canvas:
            return mrope_positions(len(expansion.token_ids), ())
        around, slices = self._vision, self._slices
        markers = {around.vision_start, around.vision_end, slices.slice_start, slices.slice_end}
        if slices.line is not None:
            markers.add(slices.line)
        layouts = [record.slices for record in expansion.records]
        return _canvas_positions(expansion.token_ids, expansion.spans, layouts, markers, known)

    def _add_medium(self, out: Expansion, text: str, record: MediaRecord, item: int) -> None:
        assert not text
        if record.modality in self._numbered:
            number = sum(other.modality == record.modality for other in out.records)
            out.token_ids.append(self._slices.id_start)
            self._add_text(out, str(number))
            out.token_ids.append(self._slices.id_end)
        size = 1 if record.slices is None else 1 + record.slices.count
        for first in range(0, len(record.hashes), size):
            self._add_picture(out, record, item, first)

    def _add_picture(self, out: Expansion, record: MediaRecord, item: int, first: int) -> None:
        slices = record.slices
        around = (self._vision.vision_start, self._vision.vision_end)
        self._add_between(out, around, record, item, first)
        if slices is None:
            return
        for row in range(slices.rows):
            if row:
                self._add_text(out, "\n")
            for column in range(slices.columns):
                patch = first + 1 + row * slices.columns + column
                around = (self._slices.slice_start, self._slices.slice_end)
                self._add_between(out, around, record, item, patch)

    def _identity(self, record: MediaRecord, patch: int) -> bytes:
        """Return the content hash; on a canvas, hash the slice layout of a whole picture with it.

        Its tokens' positions follow from the layout, but the slices themselves come later in the
        prompt.
        """
        slices, known = record.slices, record.hashes[patch]
        if not self._on_canvas or slices is None or patch % (1 + slices.count):
            return known
        layout = (slices.rows, slices.columns, *slices.grid)
        cut = ",".join(map(str, layout))
        return hasher_of(_DOMAIN, content=known, slices=cut).digest()


class TileExpander(Expander):
    """An `Expander` for pictures in tiles, as transformers' `Lfm2VlProcessor`: each tile behind a
    token that names its place, then the whole picture behind another one. Frames of videos are
    pictures in lines of their own, as in `InternVLProcessor`.

    Args:
        tokenizer: the checkpoint's.
        vision: the checkpoint's tokens.
        thumbnail: show the whole picture behind its tiles.
    """

    def __init__(self, tokenizer: Tokenizer, vision: VisionTokens, *, thumbnail: bool) -> None:
        super().__init__(tokenizer, vision)
        self._thumbnail = thumbnail

    def positions(
        self, expansion: Expansion, known: KnownPrompt | None = None
    ) -> tuple[torch.Tensor, float]:
        return mrope_positions(len(expansion.token_ids), ())

    def _pad(self, record: MediaRecord) -> int:
        return self._vision.image_pad

    def _add_medium(self, out: Expansion, text: str, record: MediaRecord, item: int) -> None:
        family, slices = self._tokenizer.family, record.slices
        if record.modality == "video":
            around = (self._vision.vision_start, self._vision.vision_end)
            for frame in range(len(record.hashes)):
                self._add_text(out, text + family.timestamp.format(0, frame + 1))
                self._add_between(out, around, record, item, frame)
                text = "\n"
            return
        assert not text and family.tile is not None and family.thumbnail is not None
        out.token_ids.append(self._vision.vision_start)
        for place in range(0 if slices is None else slices.count):
            row, column = divmod(place, slices.columns if slices is not None else 1)
            out.token_ids += self._tokenizer.encode(family.tile.format(row + 1, column + 1))
            self._add_span(out, record, item, 1 + place)
        if slices is not None and self._thumbnail:
            out.token_ids += self._tokenizer.encode(family.thumbnail)
        if slices is None or self._thumbnail:
            self._add_span(out, record, item, 0)
        out.token_ids.append(self._vision.vision_end)


def find_vision_tokens(tokenizer: Tokenizer, config: Mapping[str, Any]) -> VisionTokens:
    """Return the vision tokens in config.json, by default the family's.

    Raises CheckpointError if one is not a special token.
    """
    family = tokenizer.family

    def find(name: str, token: str) -> int:
        given = config.get(name)
        if not token:
            return -1
        token_id = tokenizer.token_to_id(token) if given is None else given
        if not isinstance(token_id, int) or not tokenizer.is_special(token_id):
            raise CheckpointError(f"{name} of the checkpoint is not a special token")
        return token_id

    video = family.video_pad
    if family.tile is not None and video not in tokenizer.special_tokens:
        video = ""  # Its pictures do not need it.
    around = ("vision_start_token_id", "vision_end_token_id")
    if family.slice_start is not None:
        around = ("image_start_id", "image_end_id")
    return VisionTokens(
        image_pad=find("image_token_id", family.image_pad),
        video_pad=find("video_token_id", video),
        vision_start=find(around[0], family.vision_start),
        vision_end=find(around[1], family.vision_end),
    )


def find_expander(
    tokenizer: Tokenizer,
    config: Mapping[str, Any],
    vision: VisionTokens,
    *processors: Processor | None,
) -> Expander:
    """Return the expander of placeholders for a model with these processors.

    Raises CheckpointError if the processors disagree or a token is missing.
    """
    configs = [processor.config for processor in processors if processor is not None]
    if len({config.merge_size for config in configs}) > 1:
        raise CheckpointError("image and video processors disagree on merge_size")
    family = tokenizer.family
    if family.tile is not None:
        tiled = (config for config in configs if isinstance(config, TileConfig))
        return TileExpander(tokenizer, vision, thumbnail=all(each.thumbnail for each in tiled))
    if not family.timestamp:
        return TimedExpander(tokenizer, vision, _position_rate(family, config))
    if family.slice_start is None:
        return Expander(tokenizer, vision)
    numbered = all(config.numbered for config in configs if isinstance(config, SliceConfig))
    return SliceExpander(
        tokenizer, vision, _find_slice_tokens(tokenizer, config), numbered=numbered
    )


def _position_rate(family: Family, config: Mapping[str, Any]) -> float | None:
    """Return the positions of a second of video; raises CheckpointError."""
    if family.position_rate is None:
        return None
    name, default = family.position_rate
    rate = config["vision_config"].get(name, config.get(name, default))
    if type(rate) not in (int, float) or not 0 < rate < _MOST_RATE:
        raise CheckpointError(f"{name} in config.json must be a positive number, not {rate!r}")
    return float(rate)


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


def _canvas_positions(
    token_ids: Sequence[int],
    spans: Sequence[MediaSpan],
    layouts: Sequence[Slices | None],
    markers: Collection[int],
    known: KnownPrompt | None = None,
) -> tuple[torch.Tensor, int]:
    """Compute the positions of every token on the three axes, and the offset of generated tokens.

    The slices of a picture lie side by side, under the whole picture, which is much smaller and is
    stretched over all of them.

    Follows transformers' `MiniCPMV4_7Model.get_rope_index`. Text counts up on all axes alike. A
    picture takes one step in time and advances the count by the longer side of its canvas. Markers
    around its parts lie at their corners. Markers and line breaks right after a picture lie at its
    origin.

    Args:
        layouts: how the pictures of each medium are cut.
        markers: the tokens around pictures and slices, and the line break.
        known: a prompt that this one continues.

    Returns:
        int64 `[3, length]`, and the position of the next text token minus the length: as in
        transformers' `generate`, an answer has the positions that its text has in a prompt, also
        where a video's last patch is later than the text behind it.
    """
    length = len(token_ids)
    positions = torch.empty((3, length), dtype=torch.int64)
    first, position = _known_positions(positions.numpy(), known)
    at = first
    for picture in _pictures(spans, layouts):
        if picture.start < first:
            continue
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
