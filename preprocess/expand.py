"""Turns rendered text and media into token ids, media spans and M-RoPE positions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.loaded_media import LoadedMedia
from vlm_serve.preprocess.media_process import MediaRecord, Slices
from vlm_serve.preprocess.prompt import MediaSpan
from vlm_serve.preprocess.reading.conversation import Modality
from vlm_serve.preprocess.tokenizer import Tokenizer
from vlm_serve.preprocess.typed_text import TypedText


@dataclass(frozen=True, slots=True)
class VisionTokens:
    """Ids of media placeholders and of the tokens around them."""

    image_pad: int
    video_pad: int
    vision_start: int
    vision_end: int

    def modality(self, token_id: int) -> Modality | None:
        """Return the modality of a placeholder, None for any other token."""
        if token_id == self.image_pad:
            return "image"
        return "video" if token_id == self.video_pad else None


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """A piece of rendered text in hidden form: a special token, or the text between two of them."""

    text: str
    is_special: bool


def split_pieces(text: str, pattern: re.Pattern[str]) -> Iterator[PromptPiece]:
    """Split a rendered prompt at the template's special tokens; user text is still hidden."""
    at = 0
    for match in pattern.finditer(text):
        if match.start() > at:
            yield PromptPiece(text[at : match.start()], False)
        yield PromptPiece(match.group(), True)
        at = match.end()
    if at < len(text):
        yield PromptPiece(text[at:], False)


def last_pieces(
    tokenizer: Tokenizer, typed: TypedText, pieces: Sequence[PromptPiece], count: int
) -> list[PromptPiece]:
    """Return the end of a prompt without media: at least its last `count` tokens, or all.

    The time is that of encoding about as many tokens.
    """

    def encode(text: str) -> list[int]:
        return tokenizer.encode_plain(typed.restore(text))

    kept: list[PromptPiece] = []
    wanted = tokenizer.enough(count)
    for piece in reversed(pieces):
        if wanted <= 0:
            break
        at, found = (0, 1) if piece.is_special else tokenizer.find_end(piece.text, wanted, encode)
        kept.append(PromptPiece(piece.text[at:], piece.is_special))
        wanted -= found
    return kept[::-1]


@dataclass(slots=True)
class Expansion:
    """Token ids under construction.

    Attributes:
        token_ids, spans, media_ends, message_ends: as in `Prompt`.
        piece_starts: number of tokens before each piece.
        modalities, layouts: modality and slice layout of every medium so far; filled for families
            with slices.
    """

    token_ids: list[int] = field(default_factory=list)
    spans: list[MediaSpan] = field(default_factory=list)
    media_ends: list[int] = field(default_factory=list)
    message_ends: list[int] = field(default_factory=list)
    piece_starts: list[int] = field(default_factory=list)
    modalities: list[Modality] = field(default_factory=list)
    layouts: list[Slices | None] = field(default_factory=list)


class Expander:
    """Expands the placeholders of rendered prompts, as transformers' `Qwen3VLProcessor` does.

    Args:
        tokenizer: the checkpoint's.
        vision: the checkpoint's vision tokens; None for a text-only one.
    """

    joins_text: frozenset[Modality] = frozenset({"video"})
    """Media whose first timestamp is tokenised together with the text before it."""

    def __init__(self, tokenizer: Tokenizer, vision: VisionTokens | None) -> None:
        self._tokenizer = tokenizer
        self._vision = vision

    def positions(self, expansion: Expansion) -> tuple[torch.Tensor, int]:
        """See `mrope_positions`."""
        return mrope_positions(len(expansion.token_ids), expansion.spans)

    def expand(
        self, pieces: Sequence[PromptPiece], typed: TypedText, media: Sequence[LoadedMedia]
    ) -> Expansion:
        """Expand a prompt's placeholders and tokenise its text.

        Raises InvalidRequestError unless the template placed exactly these media in this order.
        """
        out, text, item = Expansion(), "", 0
        for piece in pieces:
            if not piece.is_special:
                out.piece_starts.append(len(out.token_ids))
                text = typed.restore(piece.text)
                continue
            token_id = self._tokenizer.special_tokens[piece.text]
            modality = self._vision.modality(token_id) if self._vision is not None else None
            if modality is None:
                self._add_text(out, text)
                out.piece_starts.append(len(out.token_ids))
                out.token_ids.append(token_id)
                if token_id in self._tokenizer.end_of_turn_ids:
                    out.message_ends.append(len(out.token_ids))
            else:
                if item == len(media) or media[item].record.modality != modality:
                    raise _misplaced()
                if modality not in self.joins_text:
                    self._add_text(out, text)
                    text = ""
                out.piece_starts.append(len(out.token_ids))
                if modality == "image":
                    self._add_image(out, media[item].record, item)
                else:
                    self._add_video(out, text, media[item].record, item)
                out.media_ends.append(out.spans[-1].end)
                item += 1
            text = ""
        self._add_text(out, text)
        if item != len(media):
            raise _misplaced()
        return out

    def _add_text(self, out: Expansion, text: str) -> None:
        out.token_ids += self._tokenizer.encode_plain(text)

    def _add_span(self, out: Expansion, record: MediaRecord, item: int, patch: int) -> None:
        assert self._vision is not None
        _, rows, columns = record.span(patch)
        pad = self._vision.image_pad if record.modality == "image" else self._vision.video_pad
        start = len(out.token_ids)
        end = start + rows * columns // record.merge_size**2
        out.token_ids += [pad] * (end - start)
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
            )
        )

    def _identity(self, record: MediaRecord, patch: int) -> bytes:
        """Return the hash that, with a span's size, determines its tokens and positions."""
        return record.hashes[patch]

    def _add_image(self, out: Expansion, record: MediaRecord, item: int) -> None:
        self._add_span(out, record, item, 0)

    def _add_video(self, out: Expansion, text: str, record: MediaRecord, item: int) -> None:
        assert self._vision is not None
        for patch, seconds in enumerate(record.times):
            self._add_text(out, text + self._tokenizer.family.timestamp.format(seconds))
            text = ""
            out.token_ids.append(self._vision.vision_start)
            self._add_span(out, record, item, patch)
            out.token_ids.append(self._vision.vision_end)


def _misplaced() -> InvalidRequestError:
    return InvalidRequestError(
        "the chat template does not place the images and videos in the order of the messages",
        param="messages",
    )


def shared_tokens(
    tokenizer: Tokenizer,
    typed: TypedText,
    pieces: Sequence[PromptPiece],
    expansion: Expansion,
    other: Sequence[PromptPiece],
) -> int:
    """Count the leading tokens that a prompt shares with a second rendering.

    Args:
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
    mine, theirs = (
        tokenizer.encode_plain(typed.restore(piece.text)) for piece in (pieces[same], other[same])
    )
    return start + common_length(mine, theirs)


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the number of leading items that two sequences share."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (mine, other) in pairs if mine != other), min(len(first), len(second)))


def mrope_positions(length: int, spans: Sequence[MediaSpan]) -> tuple[torch.Tensor, int]:
    """Compute the positions of every token on the three axes, and the offset of generated tokens.

    Follows transformers' `Qwen3_5Model.get_rope_index` for a prompt whose videos are split at their
    temporal patches.

    Returns:
        int64 `[3, length]`, and the highest position plus one minus the length.
    """
    # NumPy instead of torch: every torch operation releases the GIL, and on a busy server
    # reacquiring it takes longer than this whole function.
    positions = np.empty((3, length), dtype=np.int64)
    at, position = 0, 0
    for span in spans:
        text = span.start - at
        positions[:, at : span.start] = np.arange(position, position + text)
        position += text
        rows, columns = span.grid[1] // span.merge_size, span.grid[2] // span.merge_size
        positions[0, span.start : span.end] = position
        positions[1, span.start : span.end] = np.arange(position, position + rows).repeat(columns)
        positions[2, span.start : span.end].reshape(rows, columns)[:] = np.arange(
            position, position + columns
        )
        # As in the reference: take the longer side first, then divide by the merge size.
        position += max(span.grid[1], span.grid[2]) // span.merge_size
        at = span.end
    positions[:, at:] = np.arange(position, position + length - at)
    delta = int(positions.max()) + 1 - length if length else 0
    return torch.from_numpy(positions), delta
