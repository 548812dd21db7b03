"""Libraries whose kernels may take the place of this project's on a GPU, chosen once at start.

This project's kernels know every case, and compute what a library's do not take. The check at start
(`triton_check.py`) compares whichever was chosen with torch. Which one it is, and its version,
is in the name of the numerics.
"""

from __future__ import annotations

from vlm_serve.errors import ConfigError
from vlm_serve.kernels import gated_delta
from vlm_serve.kernels.gated_delta import fla

BUNDLED = "own"
LIBRARIES = (BUNDLED, "fla")
"""`fla`: prefill of the gated delta rule by flash-linear-attention."""


def named(library: str, *, ranks: int, deterministic: bool) -> str:
    """Return what the name of the numerics says of a library; "" for this project's kernels.

    Args:
        library: of LIBRARIES.
        ranks: processes that compute.
        deterministic: True if a row's bits must not depend on its batch.

    Raises:
        ConfigError: it cannot serve, with the reason.
    """
    if library == BUNDLED:
        return ""
    said = fla.problem()
    if not said and deterministic:
        said = "nobody has shown that its bits do not depend on the batch"
    if not said and ranks > 1:
        said = "it serves one GPU alone so far"
    if said:
        raise ConfigError(f"gpu_kernels {library}: {said}", param="gpu_kernels")
    return f"chunk_gated_delta by {fla.PACKAGE} {fla.VERSION}"


def choose(library: str) -> None:
    """Let a library compute what it can, for all engines of this process from now on.

    Raises:
        ConfigError: its kernels are not what they are known to be.
    """
    if library != BUNDLED:
        fla.pin_tiles()
    gated_delta._chunk.choose(None if library == BUNDLED else library)
