"""Lines of the debug log: what each request finds in the cache, starts from and leaves there."""

from __future__ import annotations

import logging

from vlm_serve.cache.matching import key_at
from vlm_serve.cache.records import Snapshot
from vlm_serve.engine.core.hooks import Admission
from vlm_serve.engine.core.queues import SequenceQueues
from vlm_serve.engine.requests.sequence import Sequence
from vlm_serve.preprocess.identity.keys import PromptKeys

_log = logging.getLogger(__name__)


class CacheLog:
    """Logs matches, restored states and saved states.

    Args:
        queues: the sequences, and their cache.
    """

    def __init__(self, queues: SequenceQueues) -> None:
        self._queues = queues
        self._ended: tuple[str, PromptKeys] | None = None
        queues.cache.events.snapshot_ready.subscribe(self._saved)

    @classmethod
    def wanted(cls) -> bool:
        """Return True if the debug log is on."""
        return _log.isEnabledFor(logging.DEBUG)

    def on_matched(self, admission: Admission) -> None:
        """Log a match, and the state that a sequence starts from."""
        match, name, boundary = admission.match, admission.request.request_id, admission.boundary
        found = f"(KV {match.kv_boundary}, state {match.state_boundary})"
        where = boundary, len(admission.request.prompt), found, admission.reason
        _log.debug("match: request %s, boundary %d of %d tokens %s, reason %s", name, *where)
        if boundary and match.snapshot is not None:
            kind = match.snapshot.kind
            _log.debug("restore: request %s, boundary %d, reason %s", name, boundary, kind)

    def on_admitted(self, sequence: Sequence) -> None:
        """Log a sequence that goes on with its own state."""
        name, computed = sequence.request.request_id, sequence.num_computed
        if computed > sequence.num_cached:
            _log.debug("restore: request %s, boundary %d, reason suspended", name, computed)

    def on_ended(self, sequence: Sequence) -> None:
        """Remember a sequence that may leave its live state behind."""
        self._ended = sequence.request.request_id, sequence.keys

    def _saved(self, snapshot: Snapshot) -> None:
        where = snapshot.position, snapshot.kind
        _log.debug("save: request %s, boundary %d, reason %s", self._owner(snapshot), *where)

    def _owner(self, snapshot: Snapshot) -> str:
        """Return the request whose tokens lead to a snapshot; "-" if none does that is here, as for
        one from a lower tier."""
        here = self._queues.holders
        known = [(sequence.request.request_id, sequence.keys) for sequence in here]
        for name, keys in [*known, self._ended] if self._ended else known:
            cut = snapshot.position
            if cut in keys.cuts and snapshot.node and key_at(keys, cut) == snapshot.node.key:
                return name
        return "-"
