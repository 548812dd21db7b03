"""Start modules of this package as child processes that import nothing from the current folder.

`python -m MODULE` and `python -c` search the current folder first, and a server may be started in a
folder of untrusted files. A child is therefore started as this file, by its path and with `-P`. It
finds the package by its path, installed or not, and nothing beside it in a source tree.

`children.start` starts them. This file imports nothing else until the import path is safe.
"""

from __future__ import annotations

import contextlib
import os
import sys

PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
PACKAGE = "vlm_serve"  # The folder may have another name, with a link to it.
BOUND_TO = "--bound-to="
"""Begins the argument with the process id of the parent, with which a child ends."""
_PR_SET_PDEATHSIG = 1


def command(module: str, *arguments: str) -> list[str]:
    """Return the command to start a module of this package with `arguments` in `sys.argv`."""
    flags = ["-P"]
    flags += ["-E"] if sys.flags.ignore_environment else []
    flags += ["-s"] if sys.flags.no_user_site else []
    return [sys.executable, *flags, os.path.realpath(__file__), module, *arguments]


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a child: this process's own, updated with `variables`."""
    return {**os.environ, **search_path(), **variables}


def search_path() -> dict[str, str]:
    """Return the variables for the import path of a child and of its own children.

    An empty entry of PYTHONPATH (after a trailing colon, say) means the current folder and is
    dropped. The other entries stay and become absolute.
    """
    entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join(map(os.path.abspath, entries))
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": path}


def forget_current_folder() -> None:
    """Remove the current folder from the command line's import path, unless the user put it there.

    `python -m` makes Python search it first, and so does an empty entry of PYTHONPATH (a stray
    colon). By now Python has looked up a few modules of its own there, but none of this package:
    they are found below its folder. Programs merely importing this package keep their path.
    """
    begins = sys.argv[:1] == ["-m"]  # Python replaces it with the file's name once it is found.
    if not (_runs_module() if begins else os.path.basename("".join(sys.argv[:1])) == "vlm-serve"):
        return
    named = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    entries = named.split(os.pathsep) if named else []
    with contextlib.suppress(FileNotFoundError, ValueError):  # The current folder was removed.
        here = os.getcwd()
        if begins and not sys.flags.safe_path and sys.path[:1] == [here]:
            del sys.path[0]
        if "" in entries and here not in map(os.path.abspath, filter(None, entries)):
            sys.path.remove(here)


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; exit if that has already ended.

    Stopped and waiting processes are killed too. After a fork the setting is gone.

    Args:
        parent: process id of the parent.
    """
    import ctypes
    from signal import SIGKILL

    # Only Linux has it; elsewhere children see that their pipes are closed.
    if hasattr(ctypes.CDLL(None), "prctl"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def _runs_module() -> bool:
    """Return True if `python -m` was asked to run a module of this package."""
    option = sys.orig_argv[-len(sys.argv)]  # `-m NAME` or `-mNAME`.
    module = option.partition("m")[2] if option.startswith("-") else option
    return module.partition(".")[0] == PACKAGE


def _main() -> None:
    """Load the package around this file and run the module named in `sys.argv`."""
    from importlib.util import module_from_spec, spec_from_file_location
    from runpy import run_module

    if sys.argv[1].startswith(BOUND_TO):
        end_with(int(sys.argv.pop(1).removeprefix(BOUND_TO)))
    file = os.path.join(PACKAGE_FOLDER, "__init__.py")
    spec = spec_from_file_location(PACKAGE, file, submodule_search_locations=[PACKAGE_FOLDER])
    assert spec is not None
    assert spec.loader is not None
    package = module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)
    del sys.argv[0]
    run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
