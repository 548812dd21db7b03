"""Prepares a `Prompt` from messages. Earlier calls save work and change no result."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from vlm_serve.errors import InvalidRequestError
from vlm_serve.preprocess.expand import (
    Expander,
    VisionTokens,
    common_length,
    find_expander,
    find_vision_tokens,
    mrope_positions,
    shared_tokens,
)
from vlm_serve.preprocess.identity.keys import (
    NO_ADAPTER,
    AdapterIdentity,
    Mark,
    Owners,
    PromptKeys,
    RootFields,
    Roots,
    WeightsIdentity,
)
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.known_prompts import Expansion, KnownPrompt, KnownPrompts
from vlm_serve.preprocess.media.decoders import Decoders
from vlm_serve.preprocess.media.documents import Documents
from vlm_serve.preprocess.media.fetch import Hold, Holding
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.preprocess.media.loading import LoadedMedia, MediaLoader, is_remote
from vlm_serve.preprocess.media.media_processors import find_processors
from vlm_serve.preprocess.media.part_options import ONE_OF_EACH, MediaDefaults
from vlm_serve.preprocess.media.raw_index import RawIndex, UploadRecords
from vlm_serve.preprocess.reading.conversation import CacheWishes, Conversation, MediaPart, Modality
from vlm_serve.preprocess.reading.reader import read_conversation
from vlm_serve.preprocess.reading.turns import fit_systems
from vlm_serve.preprocess.text.family import Family, answering_part
from vlm_serve.preprocess.text.known_pieces import KnownPieces
from vlm_serve.preprocess.text.known_turns import KnownTurns
from vlm_serve.preprocess.text.marks import places_of, token_places
from vlm_serve.preprocess.text.rendering import (
    ChatRequest,
    PromptPiece,
    Rendering,
    TypedText,
    answer_begun,
    last_pieces,
    split_pieces,
    texts_of,
)
from vlm_serve.preprocess.text.sentence_files import Sentences, template_of
from vlm_serve.preprocess.text.template import (
    ChatTemplate,
    TemplateTraits,
    load_template,
    named_chat_template,
)
from vlm_serve.preprocess.text.tokenizer import Tokenizer, checked_ids, read_json
from vlm_serve.system.stopping import ConcurrencyLimiter, Stop

_log = logging.getLogger(__name__)
_SALT = re.compile(r"[A-Za-z0-9._:=+/@-]{0,128}")
_THREADS = 64
# Per request: enough to keep all decoding processes busy, and to overlap slow downloads.
_DECODED_AT_ONCE = 8
_FETCHED_AT_ONCE = 16
DEFAULT_RAW_INDEX_BYTES = 16 << 20
DEFAULT_KNOWN_TEXT_BYTES = 64 << 20
# Of that memory, in eighths.
_PROMPTS, _PIECES, _TURNS = 5, 2, 1
# Of a character; no token has fewer than one byte.
_MOST_BYTES = 4


class Preprocessor:
    """Prepares prompts for one checkpoint. Thread-safe; `prepare` is pure.

    Args:
        directory: the checkpoint.
        block_size: tokens per KV block.
        root_key: fields of the root key; the processors' fingerprint and the salt of each prompt
            are filled in. Alternatively, a function from a salt to a 32-byte root key, whatever the
            weights.
        weights: the model's, with fields of the root key; see `renew`.
        family: the model's; None: the one named by its config.json.
        config: what counts as the content of config.json; None: the file's.
        limits: limits on media.
        raw_index_bytes: memory for repeated uploads, and again for frames of videos; 0: none.
        known_text_bytes: memory for earlier prompts and their pieces of text; 0: none.
        max_tokens, generation: see `Tokenizer`.
        template_file: a chat template instead of the checkpoint's.
        template_kwargs: default variables of the template.
        sentences: files of an embedder.
        marks_cut: cut points change no bit of the model's states, so marks are cut points. False:
            a mark moves down to the last other one.

    Attributes:
        weights: of the keys of prompts; None: the function of the root key knows.
        tokenizer: the checkpoint's.
        raw_index: the memory of uploads.
        known_text: the memory of texts.
        takes_media: whether prompts may have pictures or videos.
        normalised: whether vectors have a length of 1.
        sentences: of an embedder of texts alone.

    Raises CheckpointError if the checkpoint's files are missing or not supported.
    """

    def __init__(
        self,
        directory: Path | str,
        *,
        block_size: int,
        root_key: RootFields | Callable[[str], bytes],
        weights: WeightsIdentity | None = None,
        family: Family | None = None,
        config: Mapping[str, Any] | None = None,
        limits: MediaLimits | None = None,
        raw_index_bytes: int = DEFAULT_RAW_INDEX_BYTES,
        known_text_bytes: int = DEFAULT_KNOWN_TEXT_BYTES,
        max_tokens: int | None = None,
        generation: Path | None = None,
        template_file: Path | str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        sentences: Sentences | None = None,
        marks_cut: bool = True,
    ) -> None:
        if config is None:
            config = answering_part(read_json(Path(directory) / "config.json"))
        self.tokenizer = Tokenizer(directory, family, max_tokens, generation, config)
        self.known_text = KnownText(self.tokenizer, known_text_bytes)
        self.block_size = block_size
        assert (weights is None) != isinstance(root_key, RootFields)
        self._root_key, self.weights = root_key, weights
        names = self.tokenizer.special_names
        self.normalised = sentences is None or sentences.normalised
        self.sentences = None if config.get("vision_config") else sentences
        if self.sentences is not None:
            self._template = ChatTemplate(template_of(self.tokenizer), names, None)
        elif template_file is None:
            self._template = ChatTemplate(named_chat_template(directory)[1], names, template_kwargs)
        else:
            self._template = load_template(template_file, names, template_kwargs)
        images, videos = (None, None)
        self._expander = Expander(self.tokenizer, VisionTokens())
        self.media_token_ids: frozenset[int] = frozenset()
        missing: dict[Modality, str] = {}
        if config.get("vision_config"):
            images, videos = find_processors(directory, config, self.tokenizer.family)
            missing = {} if images is not None else {"image": "preprocessor_config.json"}
            if videos is None:
                missing["video"] = "video_preprocessor_config.json"
            for modality, file in missing.items():
                _log.warning("the checkpoint has no %s: the model takes no %ss", file, modality)
            vision = find_vision_tokens(self.tokenizer, config)
            self.media_token_ids = frozenset({vision.image_pad, vision.video_pad})
            self._expander = find_expander(self.tokenizer, config, vision, images, videos)
        self.raw_index = RawIndex(raw_index_bytes)
        limits = limits or MediaLimits()
        self._marks_cut = marks_cut
        self._decoders = Decoders()
        self._loader = MediaLoader(images, videos, limits, self.raw_index, self._decoders, missing)
        self._documents = Documents(partial(self._decoders.pages, limits), self._loader.check_count)
        self.takes_media = images is not None or videos is not None
        self._vocab_size = max(self.tokenizer.vocab_size, _vocab_size(config))
        # Both pools mostly wait: one for remote hosts of any slowness, the other for the decoders.
        # Separate pools keep slow hosts from blocking decodes.
        self._fetching = ThreadPoolExecutor(_THREADS, thread_name_prefix="vlm-serve-fetch")
        self._decoding = ThreadPoolExecutor(_THREADS, thread_name_prefix="vlm-serve-media")

    @property
    def template_traits(self) -> TemplateTraits:
        """The inputs that the chat template accepts."""
        return self._template.traits

    def count_fetched(self, holding: Holding | None) -> None:
        """Count fetched bytes against a second budget too; None: against the own limit only."""
        self._loader.shared_budget = holding

    def keep_records(self, records: UploadRecords) -> None:
        """Keep records of uploaded files in `records` too, beyond this process."""
        self._loader.keep_records(records)

    def know_embeddings(self, embedded: Callable[[bytes], bool]) -> None:
        """See `MediaLoader.embedded`."""
        self._loader.embedded = embedded

    @property
    def media_counts(self) -> Counter[str]:
        """A copy of `MediaLoader.counts`."""
        return self._loader.counts.copy()

    def forget(self) -> None:
        """Forget earlier uploads and texts."""
        self.raw_index.clear()
        self.known_text.clear()

    def close(self) -> None:
        """End the media threads and processes. Afterwards nothing can be prepared."""
        self._decoders.close()
        for pool in (self._fetching, self._decoding):
            pool.shutdown(wait=True, cancel_futures=True)

    def renew(self, weights: WeightsIdentity) -> None:
        """Make the keys of prompts from now on those of other weights."""
        self.weights = weights

    def root_key(self, cache_salt: str = "", adapter: str = "") -> bytes:
        """Return the root key of a tenant's prompts; `adapter`: digest of an adapter. Raise as
        `owner_key` does."""
        return self._roots(cache_salt, AdapterIdentity(adapter, adapter)).prompt

    def owner_key(self, cache_salt: str = "", adapter: str = "") -> bytes:
        """Return the key from which that root key is made, whatever the weights.

        Raises InvalidRequestError for a salt that is too long or has unsupported characters.
        """
        if not isinstance(cache_salt, str) or not _SALT.fullmatch(cache_salt):
            raise InvalidRequestError(
                "cache_salt must be at most 128 letters, digits or ._:=+/@-", param="cache_salt"
            )
        if isinstance(self._root_key, RootFields):
            fields = replace(
                self._root_key,
                adapter=adapter,
                cache_salt=cache_salt,
                processor_fingerprint=self._loader.fingerprint,
            )
            return fields.key()
        assert not adapter, "adapters need the fields of a root key"
        return self._root_key(cache_salt)

    def _roots(self, cache_salt: str, adapter: AdapterIdentity) -> Roots:
        """Return a prompt's root keys. Adapters that leave the tower alone share embeddings."""
        keys = {digest: self.owner_key(cache_salt, digest) for digest in {*adapter}}
        owners = Owners(*(keys[digest] for digest in adapter))
        weights = self.weights
        return Roots(*owners, owners) if weights is None else Roots.of(owners, weights)

    def encode(self, text: str, *, cache_salt: str = "") -> list[int]:
        """Encode a tenant's text in which special tokens keep their meaning; add no tokens.

        Raises InvalidRequestError as `root_key` does, and ContextLengthError for a text far beyond
        the context.
        """
        self.owner_key(cache_salt)
        encode_all = self.known_text.pieces.encode_all
        pattern, ids = self.tokenizer.special_pattern, self.tokenizer.special_tokens
        self.tokenizer.check_specials(text)
        texts = pattern.split(text)
        check = partial(self.tokenizer.check_length, texts)
        pieces = encode_all(texts, cache_salt, check)
        found = [ids[match.group()] for match in pattern.finditer(text)]
        rest = ([token_id, *piece.ids] for token_id, piece in zip(found, pieces[1:], strict=True))
        return [*pieces[0].ids, *chain.from_iterable(rest)]

    def prepare_tokens(
        self,
        token_ids: Sequence[int],
        *,
        cache_salt: str = "",
        adapter: AdapterIdentity = NO_ADAPTER,
    ) -> Prompt:
        """Prepare a prompt of raw token ids; all of them count as text, placeholders too. Options
        are those of `prepare`.

        Raises InvalidRequestError if there are none or one is out of the vocabulary.
        """
        roots = self._roots(cache_salt, adapter)
        ids = checked_ids(token_ids, self._vocab_size)
        positions, delta = mrope_positions(len(ids), ())
        return Prompt(
            token_ids=ids,
            positions=positions,
            rope_delta=delta,
            keys=self._keys(roots, ids, ()),
            adapter=adapter,
        )

    def _keys(
        self,
        roots: Roots,
        token_ids: Sequence[int],
        spans: Sequence[Any],
        known: KnownPrompt | None = None,
    ) -> PromptKeys:
        return PromptKeys(
            roots.prompt,
            token_ids,
            known=None if known is None else known.keys,
            shared=0 if known is None else known.tokens,
            vision_root=roots.vision,
            owners=roots.owners,
            block_size=self.block_size,
            spans=spans,
            end_of_turn_ids=self.tokenizer.end_of_turn_ids,
        )

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]] | Conversation,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        media_io_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str = "",
        adapter: AdapterIdentity = NO_ADAPTER,
        stop: Stop | None = None,
    ) -> Prompt:
        """Prepare the prompt of a conversation.

        Args:
            messages: OpenAI's form; Python callers may also use `{"type": "image", "image": X}` and
                `{"type": "video", "video": X, "fps": f}` with X a PIL image, uint8 frames, a path,
                a URL or bytes. A server must not pass such parts on from its clients.
                Alternatively, a `Conversation`, which has the next six options itself.
            tools: function definitions for the template.
            add_generation_prompt: end with the beginning of an assistant's turn; None: unless the
                last message is continued.
            continue_final_message: leave the last message open for the model to continue.
            chat_template_kwargs: further variables of the template, such as enable_thinking.
            media_io_kwargs, mm_processor_kwargs: options of all media, as vLLM names them (see
                `MediaDefaults`); a part's own options take precedence.
            cache_salt: tenants with different salts share no cache entry.
            adapter: of the model's weights, which shares no entry either.
            stop: setting it ends the preparation, which then raises StoppedError.

        Raises InvalidRequestError (and its subclasses MediaError and MediaFetchError) with the
        field at fault in `param`.
        """
        conversation = messages
        if not isinstance(messages, Conversation):
            body = {
                "messages": () if messages is None else messages,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "chat_template_kwargs": chat_template_kwargs,
                "media_io_kwargs": media_io_kwargs,
                "mm_processor_kwargs": mm_processor_kwargs,
            }
            conversation = read_conversation("chat", body)
        assert isinstance(conversation, Conversation)
        mine = Stop()
        calling = stop.calling(mine.set) if stop is not None else contextlib.nullcontext()
        # Documents of URLs are held until all their pages are loaded.
        with calling, self._loader.holding(mine) as hold:
            conversation = self._with_pages(conversation, mine, hold)
            rendering = self.begin(conversation, cache_salt=cache_salt, adapter=adapter)
            loading = self.start_loading(rendering, mine)
            try:
                return self.finish(rendering, [future.result() for future in loading])
            finally:
                mine.set()

    def begin(
        self,
        conversation: Conversation,
        *,
        cache_salt: str = "",
        adapter: AdapterIdentity = NO_ADAPTER,
        last_tokens: int | None = None,
    ) -> Rendering:
        """Run the first of the three steps of `prepare`: everything possible without the media.

        For callers that do not block while media are loaded, so documents of URLs are not for it.
        Errors as in `prepare`.

        Args:
            last_tokens: without media, the end of the prompt with so many tokens is enough; the
                messages may be longer than the context.
        """
        wanted = None if conversation.media else last_tokens
        roots = self._roots(cache_salt, adapter)
        conversation = self._with_pages(conversation, Stop())
        conversation = fit_systems(conversation, anywhere=self._template.traits.late_systems)
        turns = self.known_text.turns.of(cache_salt)
        request = ChatRequest(conversation, self._template, turns)
        media = self._with_defaults(conversation) if conversation.names_media else []
        self._template.check_kwargs(request.kwargs)
        check = partial(self._check_length, request, whole=wanted is None)
        said = texts_of(request.messages) if wanted is None else []
        if self.tokenizer.is_probably_too_long([request.tools_text(), *said]):
            check()
        try:
            typed = TypedText(
                [request.messages, request.tools, request.kwargs],
                tuple(self.tokenizer.special_tokens),
                self.tokenizer.special_pattern,
            )
            text = request.render(typed)
        except InvalidRequestError:
            check()
            raise
        pieces = tuple(split_pieces(text, self.tokenizer.special_pattern))
        kept: tuple[PromptPiece, ...] = pieces
        near: Callable[[], None] | None = partial(check, pieces=pieces)
        if wanted is not None:
            check()
            kept, near = tuple(last_pieces(self.tokenizer, typed, pieces, wanted)), None
        # A template may leave out texts, which count for the limit all the same.
        unseen = max(sum(map(len, said)) - len(text), 0)
        unseen *= 1 if all(map(str.isascii, said)) else _MOST_BYTES
        texts = [typed.restore(piece.text) for piece in kept if not piece.is_special]
        encoded = iter(self.known_text.pieces.encode_all(texts, cache_salt, near, unseen))
        tokens = tuple(None if piece.is_special else next(encoded) for piece in kept)
        marks: tuple[tuple[int, float], ...] = ()
        if kept == pieces:
            marks = places_of(request, typed, text, self._marked(conversation))
        cut = kept != pieces or conversation.answer_ids is not None
        if conversation.answer_ids:
            kept, tokens = answer_begun(kept, tokens, conversation.answer_ids)
        return Rendering(
            roots,
            cache_salt,
            adapter,
            request,
            media,
            typed,
            text,
            kept,
            tokens,
            cut,
            marks,
            conversation.cache,
        )

    def _marked(self, conversation: Conversation) -> CacheWishes:
        """Return the wishes with their second reading in the form of the conversation."""
        wishes, marked = conversation.cache, conversation.cache.marked
        if marked is None:
            return wishes
        marked = fit_systems(marked, anywhere=self._template.traits.late_systems)
        return replace(wishes, marked=marked)

    def _check_length(
        self, request: ChatRequest, *, whole: bool, pieces: Iterable[PromptPiece] = ()
    ) -> None:
        """Raise ContextLengthError if a request, or its rendering, is far beyond the context.

        Args:
            whole: its messages count, too.
        """
        if whole:
            self.tokenizer.check_length(texts_of(request.messages))
        self.tokenizer.check_length([request.tools_text()], "tools")
        self.tokenizer.check_length(piece.text for piece in pieces if not piece.is_special)

    def _with_pages(
        self, conversation: Conversation, stop: Stop, hold: Hold | None = None
    ) -> Conversation:
        """Return the conversation with documents as pictures. Raises as `prepare` does."""
        self._loader.check_count([part for part in conversation.media if not part.document])
        if any(part.document for part in conversation.media):
            read = partial(self._loader.read, stop=stop, hold=hold)
            wishes = conversation.cache
            if wishes.marked is not None:
                wishes = replace(wishes, marked=self._documents.expanded(wishes.marked, read))
            conversation = self._documents.expanded(conversation, read)
            conversation.cache = wishes
            self._loader.check_count(conversation.media)
        return conversation

    def _with_defaults(self, conversation: Conversation) -> list[MediaPart]:
        """Return the media with the options that hold for all, checked; also without any media."""
        defaults = MediaDefaults(conversation.media_io_kwargs, conversation.mm_processor_kwargs)
        media = defaults.apply(conversation.media)
        self._loader.check_options([*defaults.apply(ONE_OF_EACH), *media])
        return media

    def start_loading(self, rendering: Rendering, stop: Stop) -> list[Future[LoadedMedia]]:
        """Run the second step: start loading the media, a few at a time.

        The threads mostly wait. Setting the stop ends the loading at any point. The futures raise
        as `prepare` does.
        """
        if not rendering.media:
            return []
        remote = [is_remote(part) for part in rendering.media]
        load, root = self._loader.load, rendering.roots.vision
        tasks = [partial(load, part, rendering.cache_salt, stop, root) for part in rendering.media]
        futures: dict[bool, Iterator[Future[LoadedMedia]]] = {}
        for fetched, executor, limit in (
            (True, self._fetching, _FETCHED_AT_ONCE),
            (False, self._decoding, _DECODED_AT_ONCE),
        ):
            mine = [task for task, waits in zip(tasks, remote, strict=True) if waits is fetched]
            futures[fetched] = iter(ConcurrencyLimiter(executor, mine, limit).futures)
        return [next(futures[waits]) for waits in remote]

    def finish(self, rendering: Rendering, media: Sequence[LoadedMedia]) -> Prompt:
        """Run the third step: make the prompt from the rendering and its media, in order.

        Raises InvalidRequestError.
        """
        texts = tuple(zip(rendering.pieces, rendering.encoded, strict=True))
        places = self._expander.places(rendering.roots.prompt, texts, media)
        known = self.known_text.prompts.find(places)
        expansion = self._expander.expand(texts, rendering.typed, media, known)
        if not expansion.token_ids:
            raise InvalidRequestError("the messages give an empty prompt", param="messages")
        positions, delta = self._expander.positions(expansion, known)
        keys = self._keys(rendering.roots, expansion.token_ids, expansion.spans, known)
        marks = self._marks(rendering, expansion, keys)
        kept = positions if expansion.spans else None
        self.known_text.prompts.put(places, expansion, kept, keys)
        return Prompt(
            token_ids=tuple(expansion.token_ids),
            positions=positions,
            rope_delta=delta,
            keys=keys,
            adapter=rendering.adapter,
            spans=tuple(expansion.spans),
            media=tuple(media),
            media_ends=tuple(expansion.media_ends),
            message_ends=tuple(expansion.message_ends),
            system_end=rendering.system_end(expansion.message_ends),
            stable_end=self._stable_end(rendering, expansion),
            marks=marks,
            owner=self.owner_key(rendering.cache_salt) if marks else b"",
            uncached=rendering.wishes.uncached,
            next_turn=None
            if rendering.cut
            else SharedByNextTurn(self.tokenizer, self.known_text.pieces, rendering, expansion),
            # The lookups run at the same time.
            waited=max((item.waited for item in media), default=0.0),
            text=rendering.typed.restore(rendering.text),
            corrected=None
            if all(item.ready for item in media)
            else partial(self._correct, rendering, media),
        )

    def _correct(self, rendering: Rendering, media: Sequence[LoadedMedia]) -> Prompt:
        return self.finish(rendering, [item.corrected() for item in media])

    def _marks(
        self, rendering: Rendering, expansion: Expansion, keys: PromptKeys
    ) -> tuple[Mark, ...]:
        """Give the keys the client's marks, and return them as they are to be kept."""
        encode = partial(self.known_text.pieces.encode, cache_salt=rendering.cache_salt)
        seams, starts = self.known_text.pieces.seams, expansion.piece_starts
        found: dict[int, float] = {}
        for place, seconds in token_places(rendering, starts, encode, seams):
            position = place if self._marks_cut else keys.last_cut(place)
            if position and not keys.inside_span(position):
                found[position] = max(seconds, found.get(position, 0.0))
        keys.mark(found)
        if rendering.wishes.seconds is not None and (end := keys.last_cut(len(keys) - 1)):
            found[end] = max(rendering.wishes.seconds, found.get(end, 0.0))
        return tuple(Mark(*each) for each in sorted(found.items()))

    def _stable_end(self, rendering: Rendering, expansion: Expansion) -> int:
        if rendering.cut:
            return 0
        try:
            text = rendering.request.render_next_turn(rendering.typed)
        except InvalidRequestError:  # the template may refuse such a turn: then the end is unknown
            return 0
        other = tuple(split_pieces(text, self.tokenizer.special_pattern))
        encode = partial(self.known_text.pieces.encode, cache_salt=rendering.cache_salt)
        return shared_tokens(encode, rendering.typed, rendering.pieces, expansion, other)


class KnownText:
    """The memory of earlier prompts, within one limit.

    Args:
        tokenizer: the checkpoint's.
        max_bytes: the limit; 0: nothing is kept.

    Attributes:
        pieces: tokens of texts.
        prompts: prompts that others continue.
        turns: what the template wrote for a message.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int) -> None:
        share = max_bytes // 8
        self.prompts = KnownPrompts(share * _PROMPTS)
        self.pieces = KnownPieces(tokenizer, share * _PIECES)
        self.turns = KnownTurns(share * _TURNS)

    @property
    def num_bytes(self) -> int:
        """Memory of all that is kept."""
        return self.prompts.num_bytes + self.pieces.num_bytes + self.turns.num_bytes

    @property
    def counts(self) -> dict[str, int]:
        """What was known or not: parts of texts, and beginnings of prompts."""
        parts, prompts = self.pieces.counts, self.prompts.counts
        return {
            "part_hits": parts["hits"],
            "part_misses": parts["misses"],
            "prompt_hits": prompts["hits"],
            "prompt_misses": prompts["misses"],
        }

    def clear(self) -> None:
        """Forget all of it."""
        self.pieces.clear()
        self.prompts.clear()
        self.turns.clear()


def _vocab_size(config: Mapping[str, Any]) -> int:
    text_config = config.get("text_config") or config
    return int(text_config.get("vocab_size") or 0)


@dataclass(frozen=True, slots=True)
class SharedByNextTurn:
    """Compares the tokens of one prompt and its answers with the prompt of the next turn.

    Templates trim answers, drop their thoughts and write the arguments of calls anew, and a text
    may be tokenised differently. So the conversation is rendered again, with the answer as clients
    send it back and one more turn behind it.

    Attributes:
        weights: of the keys of prompts; None: the function of the root key knows.
        tokenizer: the checkpoint's.
        known: encodes text.
        rendering, expansion: the prompt.
    """

    tokenizer: Tokenizer
    known: KnownPieces
    rendering: Rendering
    expansion: Expansion

    def __call__(self, answer: Mapping[str, Any], token_ids: Sequence[int]) -> int:
        """Return the number of leading tokens of prompt and answer that both share.

        Args:
            answer: the assistant's message in OpenAI's form, as a client sends it back.
            token_ids: the answer's tokens.

        Raises InvalidRequestError if the template refuses the answer.
        """
        request, typed = self.rendering.request, self.rendering.typed
        conversation = read_conversation("chat", {"messages": [answer]})
        text = request.render_answered(typed, conversation)
        pattern = self.tokenizer.special_pattern
        return self._shared(tuple(split_pieces(text, pattern)), token_ids)

    def _shared(self, other: Sequence[PromptPiece], token_ids: Sequence[int]) -> int:
        """Count shared tokens from the first piece on that differs; its media, if any, come before
        it in both."""
        pieces = self.rendering.pieces
        same = common_length(pieces, other)
        # The last piece of a prompt is text that the answer continues.
        whole = len(self.expansion.token_ids)
        at = whole if same == len(pieces) else self.expansion.piece_starts[same]
        expected = [*self.expansion.token_ids[at:], *token_ids]
        count = 0
        for piece in other[same:]:
            for token in self._encode(piece):
                if count == len(expected) or expected[count] != token:
                    return at + count
                count += 1
        return at + count

    def _encode(self, piece: PromptPiece) -> Sequence[int]:
        if piece.is_special:
            return (self.tokenizer.special_tokens[piece.text],)
        text = self.rendering.typed.restore(piece.text)
        return self.known.encode(text, self.rendering.cache_salt)
