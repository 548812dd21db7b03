"""Compiled CPU kernels: the library of the C++ sources, and calls into it.

A wheel carries it for several processors (`native_shipped`). Where none fits, or `build_own` was
called, it is built on first use with the installed compiler (`native_build`). If there is no
compiler, or if building, loading or the self-test (`native_self_test`) fails, torch computes
everything.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TypeAlias

from vlm_serve.kernels import (
    native_build,
    native_kept,
    native_layout,
    native_self_test,
    native_shipped,
)
from vlm_serve.kernels.native_build import BuildError
from vlm_serve.kernels.native_self_test import FLOAT32, SelfTestDigests
from vlm_serve.kernels.native_shipped import Shipped

Argument: TypeAlias = "ctypes._CArgObject | ctypes.c_int64 | int | float | None"
"""A record by reference, an address, a number."""

_INTEGER, _NUMBER, _ADDRESS = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p

FUNCTIONS: dict[str, tuple[str | type, ...]] = {
    "vlm_attention": ("Attention", _INTEGER),
    "vlm_causal_conv": ("Convolution", _INTEGER),
    "vlm_gated_delta": ("Delta", _INTEGER),
    "vlm_gated_rms_norm": ("Rows", "Rows", _ADDRESS, _NUMBER, _INTEGER),
    "vlm_gates": ("Gates", _INTEGER),
    "vlm_linear": ("Projection", _INTEGER),
    "vlm_norm_rope": ("Rows", _ADDRESS, _ADDRESS, _ADDRESS, _INTEGER, _NUMBER, _INTEGER),
    "vlm_pack": ("Packing",),
    "vlm_ranks_begin": ("Ranks", _INTEGER),
    "vlm_ranks_give_up": ("Ranks", _INTEGER),
    "vlm_ranks_barrier": ("Ranks",),
    "vlm_rms_norm": ("Rows", _ADDRESS, _NUMBER, _INTEGER),
    "vlm_rotations": (
        *3 * (_INTEGER,),
        *3 * (_ADDRESS,),
        _NUMBER,
        *2 * (_ADDRESS,),
    ),
    "vlm_self_test": (_ADDRESS,),
    "vlm_silu_times": ("Rows", "Rows", _INTEGER),
    "vlm_step": ("Program", "Step", _INTEGER),
    "vlm_times_sigmoid": ("Rows", "Rows", _INTEGER),
}
"""Parameters of every function of the library. A string names a struct passed by reference. All
functions return the value of `guarded` in `native/guard.h`."""

COMPILED_HERE = "_VLM_SERVE_OWN_KERNELS"
"""Environment variable for child processes: set, none of the wheel's libraries is used."""

UNMEASURED = "(measured at the first start)"
"""Placeholder for a digest not computed yet."""


class RanksApartError(RuntimeError):
    """Another rank has left the current step."""


_log = logging.getLogger(__name__)
_loading = threading.Lock()
_functions: dict[str, Callable[..., int]] = {}


def build_own() -> None:
    """Have this process and its children use a library compiled here, whatever the wheel carries.

    Raises:
        BuildError: the wheel's is already in use; a process has one library.
    """
    with _loading:
        if _load.cache_info().currsize and shipped() is not None:
            raise BuildError("this process already computes with the library of its wheel")
        os.environ[COMPILED_HERE] = "1"


def shipped() -> Shipped | None:
    """Return the library of the wheel that `load` uses; None if it is or would be compiled."""
    if os.environ.get(COMPILED_HERE):
        return None
    loaded = _shipped()
    return None if loaded is None else loaded[1]


def load() -> ctypes.CDLL:
    """Return the library: the wheel's, or else one built here, now if needed.

    Concurrent calls wait for the first one. After a failure, later calls fail immediately.

    Raises:
        BuildError: there is no compiler, or it failed, or its result cannot be loaded, is not for
            this processor or fails its self-test.
    """
    with _loading:
        library = _load()
    if isinstance(library, BuildError):
        raise type(library)(str(library)) from library
    return library


def built() -> bool:
    """Return True if `load` would find the library instead of building it."""
    if shipped() is not None:
        return True
    try:
        return native_kept.is_kept(native_build.recipe())
    except BuildError:
        return False
    except OSError as error:  # Another user could have written it, or the cache is unusable.
        _log.warning("compiled kernels are not used: %s", error)
        return False


def digests() -> SelfTestDigests:
    """Run the library's self-test and return its digests.

    Raises:
        BuildError: as from `load`.
    """
    return native_self_test.run(load())


def foreseen() -> SelfTestDigests:
    """Predict the result of `digests` without building, from the compiler's predefined macros.

    Raises:
        BuildError: the build is already known to fail.
    """
    if shipped() is not None:
        return digests()
    how = native_build.recipe()
    with suppress(OSError):  # An unusable cache does not prevent the build.
        if native_kept.is_kept(how):
            return digests()
    macros = native_build.instructions(how, time.monotonic() + native_build.TIME_LIMIT_S)
    pairs = UNMEASURED if "__AVX512BF16__" in macros else None
    sums = {"__AVX2__", "__ARM_FEATURE_DOTPROD", "__ARM_FEATURE_MATMUL_INT8"} & macros
    return SelfTestDigests(FLOAT32, pairs, bool(sums))


def call(name: str, *arguments: Argument) -> None:
    """Call a function of the library.

    Args:
        name: a key of `FUNCTIONS`.
        arguments: as declared there; structs by `ctypes.byref`.

    Raises:
        MemoryError: it ran out of memory.
        RanksApartError: another rank has given up, or did not arrive in time.
        RuntimeError: it failed for another reason.
        BuildError: as from `load`.
    """
    # Hot path: some ops take only a microsecond.
    result = (_functions.get(name) or _prepare(name))(*arguments)
    if result:
        if result == 1:
            raise MemoryError(f"{name} has not enough memory")
        if result == 3:
            raise RanksApartError("another rank has left the step")
        raise RuntimeError(f"{name} failed")


def _prepare(name: str) -> Callable[..., int]:
    function = getattr(load(), name)
    function.argtypes = [
        ctypes.POINTER(native_layout.struct(kind)) if isinstance(kind, str) else kind
        for kind in FUNCTIONS[name]
    ]
    function.restype = ctypes.c_int64
    _functions[name] = function
    prepared: Callable[..., int] = function
    return prepared


@cache
def _shipped() -> tuple[ctypes.CDLL, Shipped] | None:
    return native_shipped.load()


@cache
def _load() -> ctypes.CDLL | BuildError:
    if shipped() is not None:
        library, _ = _shipped() or (None, None)
        assert library is not None
        return library
    try:
        # The loader identifies libraries by name, which contains the descriptor: keep it open.
        path, descriptor = native_kept.opened(native_build.recipe())
        opened = f"/proc/self/fd/{descriptor}"
        # Without /proc load by path, which no other user can change either.
        library = ctypes.CDLL(opened if os.path.exists(opened) else str(path))
        native_self_test.check(library)
        native_kept.keep_only(path)
        return library
    except BuildError as error:
        return error
    except (OSError, AttributeError) as error:
        return BuildError(str(error))
