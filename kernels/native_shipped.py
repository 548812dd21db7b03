"""Compiled libraries inside an installed wheel, of which the best for this processor is loaded.

`make wheels` puts them into the folder `shipped`, beside an index (`release/wheels.py`). A source
tree has none. The folder is as trusted as the Python code beside it, so owners and modes are not
checked here; a damaged library (`native_build.is_sealed`), or one of other sources, is not loaded.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from vlm_serve.kernels import native_build, native_self_test
from vlm_serve.kernels.native_build import BuildError, is_sealed
from vlm_serve.kernels.native_processor import architecture, flags, tile_registers_refused

FOLDER = Path(__file__).parent / "shipped"
INDEX = "index.json"
ORDERING = ("VLM_SERVE_NATIVE_ARCH", "VLM_SERVE_NATIVE_SANITIZE")
"""Environment variables that ask for a build of one's own."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shipped:
    """One library of the index.

    Attributes:
        file: its name in the folder.
        arch: the value of `-march` it was compiled with.
        machine: x86_64 or aarch64.
        needs: instructions it may use, as /proc/cpuinfo names them.
    """

    file: str
    arch: str
    machine: str
    needs: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Path of the library."""
        return FOLDER / self.file

    def fits(self) -> bool:
        """Return True if this processor has all of its instructions, and the system grants them."""
        if self.machine != architecture() or not set(self.needs) <= flags():
            return False
        return "amx_tile" not in self.needs or not tile_registers_refused()


def write_index(folder: Path, libraries: list[Shipped]) -> None:
    """Write the index of a folder of libraries, the best first. Raises OSError."""
    index = {
        "sources": native_build.sources_digest().hex(),
        "libraries": [asdict(library) for library in libraries],
    }
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def fitting() -> list[Shipped]:
    """Return the libraries that run on this processor, the best first; none in a source tree."""
    try:
        index = json.loads((FOLDER / INDEX).read_text())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        _log.warning("the package's compiled kernels are not used: %s", error)
        return []
    if index["sources"] != native_build.sources_digest().hex():
        _log.warning("the package's compiled kernels are not used: they are of other sources")
        return []
    libraries = (
        Shipped(**{**entry, "needs": tuple(entry["needs"])}) for entry in index["libraries"]
    )
    return [library for library in libraries if library.fits()]


def wanted() -> bool:
    """Return True if no environment variable asks for a build of one's own."""
    return not any(os.environ.get(name, "0") not in ("", "0") for name in ORDERING)


def load() -> tuple[ctypes.CDLL, Shipped] | None:
    """Load the best library that passes its self-test; None if there is none.

    What fails is logged, and the next one is tried.
    """
    for library in fitting() if wanted() else []:
        try:
            return _loaded(library), library
        except (OSError, AttributeError, BuildError) as error:
            _log.warning("%s is not used: %s", library.path, error)
    return None


def _loaded(shipped: Shipped) -> ctypes.CDLL:
    descriptor = os.open(shipped.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not is_sealed(descriptor):
            raise BuildError("it is damaged")
    finally:
        os.close(descriptor)
    library = ctypes.CDLL(str(shipped.path))
    native_self_test.check(library)
    return library
