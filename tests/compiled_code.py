"""Compiled code for tests of it: waited for, and no reason to pass tests over in silence.

    python tests/compiled_code.py

Compiles it before the tests begin, as `make test` does: on a busy machine with nothing kept from
earlier starts it takes longer than a server waits, and tests would fail or compute with torch.
"""

from __future__ import annotations

import pytest

from vlm_serve.kernels import native_build, native_library
from vlm_serve.kernels.native_build import BuildError, TooSlowError

PATIENCE_S = 900.0


def wait_for_compiled_code(seconds: float = PATIENCE_S) -> None:
    """Build the library unless it is there. Skip the test where none can be built; fail it where
    that only takes too long, for a busy machine would hide what is broken.

    A failure of earlier tests, whose time limit is that of servers, is not taken for an answer.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_build, "TIME_LIMIT_S", seconds)
        for last in (False, True):
            try:
                native_library.load()
                return
            except TooSlowError as error:
                if last:
                    pytest.fail(f"compiled code is not there in time: {error}")
                native_library._load.cache_clear()
            except BuildError as error:
                pytest.skip(f"there is no compiled code here: {error}")


def main() -> None:
    """Compile what is not kept yet, however long it takes."""
    import torch  # noqa: F401  (the library takes its OpenMP)

    print("Compiling the kernels for this processor, unless they are: a minute, once.", flush=True)
    native_build.TIME_LIMIT_S = PATIENCE_S
    try:
        native_library.load()
    except BuildError as error:
        print(f"There is no compiled code here, so its tests are skipped: {error}")


if __name__ == "__main__":
    main()
