"""The adapters of an engine by name: loaded, listed, used, unloaded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vlm_serve.engine.features.adapters.options import LoRA
from vlm_serve.errors import CheckpointError, InvalidRequestError, ModelNotFoundError
from vlm_serve.models.adapters import Adapter, AdapterFile, Modules, place, read_adapter
from vlm_serve.models.adapters.folder import FILES
from vlm_serve.models.identity import Digests
from vlm_serve.options.declared import format_size
from vlm_serve.preprocess.identity.keys import NO_ADAPTER, AdapterIdentity
from vlm_serve.system.opened_files import files_below

MAX_ADAPTERS = 1000
"""Most names of adapters at a time."""
OTHERS = "other adapters"
"""The name of those that are not counted one by one, see `UsageByName`."""


@dataclass(eq=False)
class ServedAdapter:
    """An adapter under its name.

    Attributes:
        name: under which requests ask for it.
        source: the folder or the hub id that it was loaded from.
        adapter: its weights; the same object for all names of the same content.
        loaded_at: Unix time in seconds.
        users: requests that have not ended.
        leaving: it is being unloaded: no request may begin.
        copied: digests of the model's tensors of which its folder has copies, by their names.
    """

    name: str
    source: str
    adapter: Adapter
    loaded_at: int = field(default_factory=lambda: int(time.time()))
    users: int = 0
    leaving: bool = False
    copied: Digests = field(default_factory=Digests)

    @property
    def identity(self) -> AdapterIdentity:
        """The digests under which its prompts are cached."""
        return AdapterIdentity(self.adapter.digest, self.adapter.vision_digest)


class AdapterStore:
    """Adapters of one engine. Thread-safe.

    Args:
        modules: of the model.
        max_rank: of adapters that may be loaded.
        experts: projections of routed experts that adapters may change.
        dtype: of factors in memory; None: as stored.
        checked: compares what an adapter's folder has of its model, and returns the digests of the
            tensors among that; raises CheckpointError.
        digests: returns those of the model's tensors.
    """

    def __init__(
        self,
        modules: Modules,
        *,
        max_rank: int,
        experts: tuple[str, ...] = (),
        dtype: torch.dtype | None = None,
        checked: Callable[[AdapterFile], Digests] = lambda _: {},
        digests: Callable[[], Digests] = Digests,
    ) -> None:
        self._modules = modules
        self._max_rank = max_rank
        self._experts = experts
        self._dtype = dtype
        self._checked = checked
        self._digests = digests
        self._changed = threading.Condition()
        self._by_name: dict[str, ServedAdapter] = {}

    def load(
        self, wanted: LoRA, *, taken: tuple[str, ...] = (), below: Path | None = None
    ) -> ServedAdapter:
        """Read an adapter and offer it under its name. Requests go on meanwhile.

        Args:
            wanted: its name and its folder.
            taken: names that mean something else.
            below: a folder out of which no link of its folder may lead; None: links are followed.

        Raises:
            InvalidRequestError: the name is taken, or there are too many.
            CheckpointError, ModelNotFoundError: see `read_adapter` and `place`; or its rank is
                above the limit.
        """
        self._check_free(wanted.name, taken)
        source = Path(wanted.path)
        name = source.name if source.is_file() else ""
        folder = source.parent if name else source
        opened = None if below is None else files_below(below, folder, [name] if name else FILES)
        with opened or nullcontext(folder) as path:
            adapter, copied = self._read(path / name)
        with self._changed:
            self._check_free(wanted.name, taken)
            known = self.with_digest(adapter.digest)
            served = ServedAdapter(wanted.name, str(wanted.path), known or adapter, copied=copied)
            _check_copies(served, self._digests())
            self._by_name[wanted.name] = served
        return served

    @contextmanager
    def kept_by(self, digests: Digests) -> Iterator[None]:
        """Let no adapter come while weights change in the block.

        Args:
            digests: of the tensors that the model is to have.

        Raises:
            CheckpointError: an adapter has a copy of a tensor that would change: a start with the
                new weights would refuse it.
        """
        with self._changed:
            for served in self._by_name.values():
                _check_copies(served, digests)
            yield

    def _read(self, path: str | Path) -> tuple[Adapter, Digests]:
        file = read_adapter(path, self._dtype)
        if file.max_rank > self._max_rank:
            raise CheckpointError(
                f"the adapter has rank {file.max_rank}, more than max_lora_rank {self._max_rank}"
            )
        copied = self._checked(file)
        return place(file, self._modules, self._experts), copied

    def _check_free(self, name: str, taken: tuple[str, ...]) -> None:
        if len(self._by_name) >= MAX_ADAPTERS:
            raise InvalidRequestError(
                f"{MAX_ADAPTERS} adapters are loaded, which is the most: unload one first",
                param="lora_name",
            )
        if name in taken:
            raise InvalidRequestError(
                f"{name!r} is a name of the model: choose another for the adapter",
                param="lora_name",
            )
        if name in self._by_name:
            raise InvalidRequestError(
                f"the name {name!r} is taken: unload it first, or choose another",
                param="lora_name",
            )

    def unload(self, name: str, timeout: float | None = None) -> None:
        """Offer an adapter no longer, wait until the last request with it has ended, and free it.

        Args:
            timeout: seconds to wait; the adapter leaves later by itself. None: no limit.

        Raises:
            ModelNotFoundError: there is none of that name.
        """
        with self._changed:
            served = self._by_name.get(name)
            if served is None or served.leaving:
                raise ModelNotFoundError(f"no adapter {name!r} is loaded", param="lora_name")
            served.leaving = True
            self._leave(served)
            self._changed.wait_for(lambda: self._by_name.get(name) is not served, timeout)

    def _leave(self, served: ServedAdapter) -> None:
        if served.leaving and not served.users:
            self._by_name.pop(served.name, None)
            self._changed.notify_all()

    def find(self, name: str) -> ServedAdapter | None:
        """Return the adapter of a name."""
        served = self._by_name.get(name)
        return None if served is None or served.leaving else served

    def all(self) -> list[ServedAdapter]:
        """Return the served adapters, in the order of loading."""
        return [served for served in list(self._by_name.values()) if not served.leaving]

    def identity_of(self, lora: LoRA | str | None) -> AdapterIdentity:
        """Return the identity of an adapter by its name; a `LoRA` is loaded if it is new.

        Raises:
            ModelNotFoundError: there is none of that name.
            InvalidRequestError: the name means another folder.
            CheckpointError, ConfigError: see `load`.
        """
        if lora is None:
            return NO_ADAPTER
        served = self.find(lora if isinstance(lora, str) else lora.name)
        if isinstance(lora, LoRA) and (served is None or served.source != str(lora.path)):
            served = self.load(lora)
        if served is None:
            names = ", ".join(other.name for other in self.all()) or "none"
            raise ModelNotFoundError(
                f"no adapter {lora!r} is loaded: lora_modules gives them names, and has {names}",
                param="lora",
            )
        return served.identity

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return (out, in) of the model's modules that adapters can change."""
        return dict(self._modules.sizes)

    def with_digest(self, digest: str) -> Adapter | None:
        """Return a loaded adapter by its content."""
        for served in list(self._by_name.values()):
            if served.adapter.digest == digest:
                return served.adapter
        return None

    def begin_use(self, digest: str) -> ServedAdapter:
        """Count a request with an adapter, which `end_use` ends.

        Raises:
            ModelNotFoundError: the adapter has been unloaded.
        """
        with self._changed:
            for served in self._by_name.values():
                if served.adapter.digest == digest and not served.leaving:
                    served.users += 1
                    return served
        raise ModelNotFoundError("the request's adapter has been unloaded", param="model")

    def end_use(self, served: ServedAdapter) -> None:
        """End what `begin_use` began."""
        with self._changed:
            served.users -= 1
            self._leave(served)

    @property
    def num_bytes(self) -> int:
        """Bytes of all factors in host memory."""
        return sum(adapter.nbytes for adapter in self._distinct())

    def _distinct(self) -> list[Adapter]:
        """Return the loaded adapters, each once however many names it has."""
        return list({served.adapter.digest: served.adapter for served in self.all()}.values())

    def described(self, slots: int, *, compiled: bool) -> str:
        """Return their number and sizes for the table of the start; `slots`: of those laid out."""
        count, size = len(self.all()), format_size(self.num_bytes)
        text = f"{count} of {size} in host memory on top"
        if compiled:
            laid_out = sorted((adapter.layout_bytes for adapter in self._distinct()), reverse=True)
            text += f"; up to {slots} laid out, {format_size(sum(laid_out[:slots]))} on top"
        return text


def _check_copies(served: ServedAdapter, digests: Digests) -> None:
    """Raise CheckpointError if an adapter has a copy of a tensor that a model with these does not
    have."""
    for name, digest in served.copied.items():
        if digests.get(name) != digest:
            raise CheckpointError(
                f"the folder of the adapter {served.name!r} has a copy of {name}, from which the "
                "model's differs: save the adapter without it, or unload it first"
            )
