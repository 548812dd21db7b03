"""Changes the weights of a running engine (docs/architecture.md#epochs-of-weights).

New weights are read beside the old ones while requests go on, and take their place between two
steps. What was computed by the old ones stays in the cache under keys that name those; what had
begun starts again under keys that name the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from vlm_serve.engine.core.hooks import Admission, Loop
from vlm_serve.engine.core.scheduler import Scheduler
from vlm_serve.engine.features.adapters.store import AdapterStore
from vlm_serve.engine.features.new_weights import Call, NewWeights
from vlm_serve.engine.requests.sequence import SequenceGroup
from vlm_serve.errors import CheckpointError, ConfigError, InvalidRequestError
from vlm_serve.models import Model
from vlm_serve.models.files import copied_tensors, weight_files
from vlm_serve.models.gguf.folder import gguf_files
from vlm_serve.models.identity import config_digest, digests_of
from vlm_serve.models.registry import with_stored_head
from vlm_serve.preprocess.identity.keys import Roots, WeightsIdentity
from vlm_serve.preprocess.text.tokenizer import read_json

Tensors = Iterable[tuple[str, torch.Tensor]]
"""Tensors by their names in a checkpoint's files."""


def identity_of(model: Model) -> WeightsIdentity:
    """Return what names a model's weights."""
    return WeightsIdentity(model.fingerprint, model.tower_fingerprint)


class WeightReader:
    """Reads a model like the one that is served. Not thread-safe.

    Args:
        new: reads the weights.
        check_room: raises ConfigError if this machine has no room for a second model and so many
            bytes.

    Attributes:
        new: see above.
        model: the one that is served.
    """

    def __init__(self, new: NewWeights, check_room: Callable[[int], None]) -> None:
        self.new, self.model = new, new.model
        self._check_room = check_room
        path = self.model.origin.path
        # The folder of an update may have no config, and may be deleted after it.
        self._config, self._config_digest = read_json(path / "config.json"), config_digest(path)

    def from_folder(self, path: Path, call: Call, below: Path | None = None) -> Model:
        """Load all weights of a folder.

        Args:
            call: runs a function between two steps.
            path: has tensors of the same names and shapes; a config.json in it has to be equal.
            below: a folder out of which no link may lead; None: links are followed.

        Raises:
            CheckpointError: the folder has no such weights; the message says what differs.
            ConfigError: there is no room for them.
        """
        if gguf_files(path) is not None:
            raise CheckpointError("weights of GGUF files cannot be updated: save safetensors")
        for file in weight_files(path):
            if below is not None and below not in file.resolve().parents:
                raise CheckpointError(f"{file.name} leads out of the allowed folder")
        self._check_config(path)
        if with_stored_head(self.model.spec, path) != self.model.spec:
            raise CheckpointError(
                "it has an output projection of its own, but the served weights use embeddings"
            )
        return self._loaded(path, {}, call)

    def from_tensors(self, tensors: Tensors, call: Call) -> Model:
        """Load the weights that are served with other tensors in the place of some, as
        `from_folder` does. They are copied: later updates of others need them."""
        given = {name: each.detach().to("cpu", copy=True) for name, each in tensors}
        return self._replaced(given, call)

    def from_file(self, path: Path, call: Call) -> Model:
        """Load the weights that are served with the tensors of one safetensors file in the place of
        some, as `from_tensors` does. The file is not needed afterwards."""
        return self._replaced(copied_tensors(path, self._check_room), call)

    def _replaced(self, given: dict[str, torch.Tensor], call: Call) -> Model:
        if not given:
            raise InvalidRequestError("an update needs tensors")
        path, kept, _ = self.model.origin
        self._check_files()
        return self._loaded(path, {**kept, **given}, call)

    def again(self, call: Call) -> Model:
        """Load the weights that are served once more. Raise as `check_kept` does."""
        self.check_kept()
        return self._loaded(self.model.origin.path, {}, call)

    def check_kept(self) -> None:
        """Raise CheckpointError if the files no longer hold the weights that are served."""
        if self.model.origin.tensors:
            raise CheckpointError(
                "these weights came from memory, from which they cannot be read again: update from "
                "a folder, or keep them"
            )
        self._check_files()

    def _check_files(self) -> None:
        path, kept, digests = self.model.origin
        if digests_of(path) | {name: digests[name] for name in kept} != digests:
            raise CheckpointError(
                f"the files of {path} have changed since they were read: update from a folder"
            )

    def _loaded(self, path: Path, tensors: dict[str, torch.Tensor], call: Call) -> Model:
        self._check_room(0)
        digests = digests_of(path)
        model = self.new.read(path, tensors, call)
        if digests_of(path) != digests:
            raise CheckpointError(f"the files of {path} have changed while they were read")
        return model

    def _check_config(self, path: Path) -> None:
        """Compare a folder's config.json, if there is one, with the config that is served."""
        if not (path / "config.json").is_file():
            return
        config, served = read_json(path / "config.json"), self._config
        if config_digest(path, config) == self._config_digest:
            return
        names = sorted(config.keys() | served.keys())
        differing = [name for name in names if config.get(name) != served.get(name)]
        raise CheckpointError(
            f"its config.json differs in {', '.join(differing[:3]) or 'a file beside it'}: weights "
            "are updated under an equal config only"
        )


class WeightUpdates:
    """Swaps weights, and keys what has begun anew.

    Args:
        scheduler: of the engine.
        reader: reads the weights.
        adapters: of the engine, which stay; None: it has none.
    """

    def __init__(
        self, scheduler: Scheduler, reader: WeightReader, adapters: AdapterStore | None
    ) -> None:
        self._scheduler = scheduler
        self._reader = reader
        self._adapters = adapters

    def attach(self, loop: Loop) -> None:
        """Know the requests that have not ended."""
        self._loop = loop

    @property
    def identity(self) -> WeightsIdentity:
        """The weights that compute the next step."""
        return identity_of(self._reader.model)

    def on_added(self, group: SequenceGroup) -> None:
        """Key a request anew whose prompt was prepared under other weights."""
        keys = group.request.prompt.keys
        if Roots.of(keys.owners, self.identity).prompt != keys.root:
            group.rekey(self.identity)

    def on_matched(self, admission: Admission) -> None:
        """Report the weights."""
        admission.weights = self.identity.whole.hex()

    def check_kept(self) -> None:
        """Raise InvalidRequestError if the weights could not be read again."""
        try:
            self._reader.check_kept()
        except CheckpointError as error:
            raise InvalidRequestError(error.message) from error

    def drop(self) -> None:
        """Let go of the weights, while no step runs. `read_again` and `update` bring some."""
        self._reader.model.drop_weights()

    def read_again(self, call: Call) -> None:
        """Read the weights that were let go, on this thread.

        Raises InvalidRequestError if their files have changed, or if there is no room for them.
        """
        try:
            model = self._reader.again(call)
        except (CheckpointError, ConfigError) as error:
            raise InvalidRequestError(error.message) from error
        call(lambda: self._reader.new.take(model))

    def update(
        self,
        source: str | Path | Tensors,
        call: Call,
        *,
        abort: bool = False,
        below: Path | None = None,
        ready: Callable[[WeightsIdentity], object] | None = None,
    ) -> WeightsIdentity:
        """Read weights on this thread, have them take the place of the old ones, and return what
        names them. Not thread-safe.

        Args:
            source: folder, file or tensors; see `WeightReader`.
            call: runs a function between two steps.
            abort: requests in flight end, instead of starting again under the new weights.
            below: see `WeightReader.from_folder`.
            ready: called with what names the new weights once they are read and checked. It may
                wait, for other engines that change with this one, while requests go on; what it
                raises ends the update, and nothing has changed.

        Raises:
            InvalidRequestError: the weights cannot be used. Nothing has changed then.
        """
        try:
            if not isinstance(source, str | Path):
                model = self._reader.from_tensors(source, call)
            elif Path(source).is_file():
                model = self._reader.from_file(Path(source), call)
            else:
                model = self._reader.from_folder(Path(source), call, below)
            if ready is not None:
                with self._beside_adapters(model):
                    pass  # raises if an adapter stands in the way
                ready(identity_of(model))
            call(lambda: self._swap_beside_adapters(model, abort=abort))
            return self.identity
        except (CheckpointError, ConfigError) as error:
            raise InvalidRequestError(error.message, param="model_path") from error
        finally:
            self._reader.new.drop(call)

    def _beside_adapters(self, model: Model) -> AbstractContextManager[None]:
        return self._adapters.kept_by(model.origin.digests) if self._adapters else nullcontext()

    def _swap_beside_adapters(self, model: Model, *, abort: bool) -> None:
        with self._beside_adapters(model):
            self._swap(model, abort=abort)

    def _swap(self, model: Model, *, abort: bool) -> None:
        """Change the weights between two steps.

        Ends of answers are dropped first and running sequences give up their state, or go on with
        it for themselves, so that nothing is published that the old weights computed.
        """
        queues, hooks = self._scheduler.queues, self._scheduler.hooks
        for group in self._loop.groups if abort else ():
            self._loop.abort(group.request.request_id)
        queues.reclaim()
        groups = self._loop.groups
        for sequence in (*queues.running, *queues.waiting):
            if all(may(sequence) for may in hooks.may_restart):
                queues.retract(sequence)
            else:
                queues.seclude(sequence)
        assert not queues.kept
        for group in groups:
            for sequence in group.sequences if group.request.cold else ():
                queues.media.discard(sequence)
        self._reader.new.take(model)
        for group in groups:
            group.rekey(self.identity)
            for tell in hooks.on_rekeyed:
                tell(group)
        for renewed in hooks.on_renewed[:]:
            renewed()
