"""Decodes media off the engine's thread if their pixels are needed after all.

A repeated upload is recognised without decoding it. If its KV or embeddings have been evicted, its
request waits until it is decoded; all other requests continue. Decoding stops when the request
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor

from vlm_serve.engine.media import MediaPlanner
from vlm_serve.engine.sequence import SequenceGroup
from vlm_serve.errors import MediaError, VlmServeError
from vlm_serve.preprocess.prompt import MediaItem, Prompt, UnconfirmedError
from vlm_serve.preprocess.stopping import Stop

_THREADS = 4


class MediaLoading:
    """Loads the media that the planner requests.

    Args:
        media: provides the media to load.
        post: runs a function on the engine's thread.
        fail: ends a request with an error; called on the engine's thread.
        restart: restarts a request with another prompt; called on the engine's thread.
    """

    def __init__(
        self,
        media: MediaPlanner,
        post: Callable[[Callable[[], None]], None],
        fail: Callable[[SequenceGroup, VlmServeError], None],
        restart: Callable[[SequenceGroup, Prompt], None],
    ) -> None:
        self._media = media
        self._post = post
        self._fail = fail
        self._restart = restart
        self._in_flight: dict[MediaItem, tuple[SequenceGroup, Stop]] = {}
        # The threads mostly wait for the decoder processes.
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="vlm-serve-reload")

    @property
    def busy(self) -> bool:
        return bool(self._in_flight)

    def start(self) -> None:
        """Load the media that were requested since the last call."""
        for item, group in self._media.loading.items():
            if item not in self._in_flight:
                stop = Stop()
                self._in_flight[item] = group, stop
                self._pool.submit(self._load, item, self._media.needed.pop(item), group, stop)

    def forget(self, group: SequenceGroup) -> None:
        """Cancel the loading of media for a finished request."""
        for owner, stop in self._in_flight.values():
            if owner is group:
                stop.set()

    def close(self) -> None:
        for _, stop in self._in_flight.values():
            stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _load(
        self, item: MediaItem, needed: Collection[int], group: SequenceGroup, stop: Stop
    ) -> None:
        failure: VlmServeError | None = None
        prompt: Prompt | None = None
        try:
            prompt = _load(item, needed, group.request.prompt, stop)
        except VlmServeError as error:
            failure = error
        except Exception:
            failure = MediaError("a medium could not be decoded again")
        self._post(lambda: self._done(item, group, failure, prompt))

    def _done(
        self,
        item: MediaItem,
        group: SequenceGroup,
        failure: VlmServeError | None,
        prompt: Prompt | None,
    ) -> None:
        self._in_flight.pop(item, None)
        self._media.loading.pop(item, None)
        if group.finished:
            return
        if failure is not None:
            self._fail(group, failure)
        elif prompt is not None:
            self._restart(group, prompt)


def _load(item: MediaItem, needed: Collection[int], prompt: Prompt, stop: Stop) -> Prompt | None:
    """Decode spans of a medium. If it differs from its record, return the corrected prompt."""
    try:
        item.load(stop, needed)
    except UnconfirmedError:
        if prompt.corrected is None:
            raise
        return prompt.corrected()
    return None
