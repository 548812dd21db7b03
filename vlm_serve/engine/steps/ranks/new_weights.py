"""New weights of a model beside those that it computes with, on one rank or on several."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from vlm_serve.engine.core.executor import ExecutorLostError
from vlm_serve.engine.features.weights import Call
from vlm_serve.engine.steps.ranks.process import RankProcesses
from vlm_serve.engine.steps.ranks.task import ModelSource
from vlm_serve.errors import CheckpointError, EngineClosedError, EngineError
from vlm_serve.models import Model
from vlm_serve.system.private_files import TemporaryFolder
from vlm_serve.system.wire import ConnectionLostError

_ASK_SECONDS = 0.05
"""Between two questions to the other ranks, which have steps to compute as well."""
_FILE = "tensors.safetensors"


class RankWeights:
    """Reads weights on every rank, and has them take the place of the old ones; see `NewWeights`.

    Args:
        source: of the model.
        model: the first rank's part.
        processes: the other ranks; None: there are none.
        limit: seconds that these may take to answer.
    """

    def __init__(
        self, source: ModelSource, model: Model, processes: RankProcesses | None, limit: float
    ) -> None:
        self._source, self._model = source, model
        self._processes, self._limit = processes, limit

    def read(self, path: Path, tensors: Mapping[str, torch.Tensor], call: Call) -> Model:
        """Return the first rank's part; the others keep theirs for `take`.

        Raises:
            ExecutorLostError: a rank has ended.
        """
        source = replace(self._source, path=path)
        with self._handed(tensors) as file:
            self._ask(call, "read_weights", path, file)
            model = source.load_beside(self._model, tensors)
            while None in (read := self._ask(call, "weights_read")):
                time.sleep(_ASK_SECONDS)
        if any(fingerprint != model.fingerprint for fingerprint in read):
            raise CheckpointError(f"the files of {path} have changed while they were read")
        return model

    def take(self, model: Model) -> None:
        self._ask(lambda function: function(), "take_weights")
        self._model.take_weights(model)

    def drop(self, call: Call) -> None:
        with suppress(EngineClosedError, EngineError):
            self._ask(call, "drop_weights")

    def _ask(self, call: Call, name: str, *arguments: object) -> list[bytes | None]:
        processes, answers = self._processes, list[bytes | None]()
        if processes is None:
            return answers

        def ask() -> None:
            answers.extend(processes.ask(name, *arguments, seconds=self._limit))

        try:
            call(ask)
        except ConnectionLostError as error:
            raise ExecutorLostError(str(error)) from None
        except EngineError as error:
            raise CheckpointError(error.message) from error
        return answers

    @contextmanager
    def _handed(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[Path | None]:
        """Hand tensors to the other ranks in a file, which lasts as long as the block."""
        if not tensors or self._processes is None:
            yield None
            return
        try:
            folder = TemporaryFolder("vlm-serve-weights-")
        except OSError as error:
            raise CheckpointError(f"there is no folder for the ranks' tensors: {error}") from error
        try:
            file = Path(folder.path, _FILE)
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
            yield file
        finally:
            folder.remove()
