"""Other weights beside those that a model computes with, on one rank or on several."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from safetensors.torch import save_file

from vlm_serve.engine.core.executor import ExecutorLostError
from vlm_serve.errors import CheckpointError, EngineClosedError, EngineError
from vlm_serve.models import Model
from vlm_serve.system.private_files import TemporaryFolder
from vlm_serve.system.wire import ConnectionLostError

_ASK_SECONDS = 0.05
"""Between two questions to the other ranks, which have steps to compute as well."""
_FILE = "tensors.safetensors"
Call = Callable[[Callable[[], object]], object]
"""Runs a function between two steps: the ranks' connections belong to the thread of these."""


class NewWeights:
    """Reads weights on every rank, and has them take the place of the old ones. Not thread-safe.

    Args:
        model: the first rank's part of the one that is served.
        load: loads that part of another one from a folder, with tensors in the place of some in its
            files, bound to the same pools.
        ask: sends the other ranks a message and returns their replies; None: there are none.
    """

    def __init__(
        self,
        model: Model,
        load: Callable[[Path, Mapping[str, torch.Tensor]], Model],
        ask: Callable[..., list[bytes | None]] | None = None,
    ) -> None:
        self.model = model
        self._load, self._ask_ranks = load, ask

    def read(self, path: Path, tensors: Mapping[str, torch.Tensor], call: Call) -> Model:
        """Read weights while steps run. Return the first rank's part; the others keep theirs.

        Raises:
            CheckpointError: some rank cannot use them.
            ExecutorLostError: a rank has ended.
        """
        with self._handed(tensors) as file:
            self._ask(call, "read_weights", path, file)
            model = self._load(path, tensors)
            while None in (read := self._ask(call, "weights_read")):
                time.sleep(_ASK_SECONDS)
        if any(fingerprint != model.fingerprint for fingerprint in read):
            raise CheckpointError(f"the files of {path} have changed while they were read")
        return model

    def take(self, model: Model) -> None:
        """Compute the next step with the weights that were read; between two steps."""
        self._ask(lambda function: function(), "take_weights")
        self.model.take_weights(model)

    def drop(self, call: Call) -> None:
        """Free what other ranks have read and not taken."""
        with suppress(EngineClosedError, EngineError, CheckpointError):
            self._ask(call, "drop_weights")

    def _ask(self, call: Call, name: str, *arguments: object) -> list[bytes | None]:
        ask, answers = self._ask_ranks, list[bytes | None]()
        if ask is None:
            return answers
        try:
            call(lambda: answers.extend(ask(name, *arguments)))
        except ConnectionLostError as error:
            raise ExecutorLostError(str(error)) from None
        except EngineError as error:
            raise CheckpointError(error.message) from error
        return answers

    @contextmanager
    def _handed(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[Path | None]:
        """Hand tensors to the other ranks in a file, which lasts as long as the block."""
        if not tensors or self._ask_ranks is None:
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
