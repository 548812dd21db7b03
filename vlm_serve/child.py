"""Start modules of this package as processes of their own, which leave the current folder alone.

`python -m MODULE` and `python -c` import from the current folder before anything else, and the
folder that a server is started in may be full of somebody else's files. So a child is started as
this file, by its path and with `-P`. It finds the package by that path, whether or not it is
installed, and nothing that lies beside the package of a source tree.
"""

from __future__ import annotations

import contextlib
import os
import sys

PACKAGE_FOLDER = os.path.dirname(os.path.realpath(__file__))
PACKAGE = "vlm_serve"  # A link of this name may lead to a folder of another one.


def command(module: str, *arguments: str) -> list[str]:
    """Return what starts a module of this package, with `arguments` behind its name in
    `sys.argv`."""
    flags = ["-P"]
    flags += ["-E"] if sys.flags.ignore_environment else []
    flags += ["-s"] if sys.flags.no_user_site else []
    return [sys.executable, *flags, os.path.join(PACKAGE_FOLDER, "child.py"), module, *arguments]


def environment(**variables: str) -> dict[str, str]:
    """Return the variables of a child: those of this process, and `variables`."""
    return {**os.environ, **search_path(), **variables}


def search_path() -> dict[str, str]:
    """Return the variables that tell a child, and what it starts in turn, where to import from.

    An empty entry of PYTHONPATH, such as a colon at its end leaves, means the current folder: it
    goes. What a user has named stays, as the folder that the name means here.
    """
    entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    path = os.pathsep.join(map(os.path.abspath, entries))
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": path}


def forget_current_folder() -> None:
    """Have the command line import nothing from the current folder, unless it is told to.

    `python -m` has Python look there before anything else, and so has an empty entry of PYTHONPATH,
    such as a colon too many leaves. Python has looked up a few modules of its own there by then,
    but none of ours, which are found below this package. Another program keeps its path.
    """
    begins = sys.argv[:1] == ["-m"]  # Until the module has been found; then it is the file's name.
    if not (_runs_module() if begins else os.path.basename("".join(sys.argv[:1])) == "vlm-serve"):
        return
    named = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    entries = named.split(os.pathsep) if named else []
    with contextlib.suppress(FileNotFoundError, ValueError):  # A folder that was removed.
        here = os.getcwd()
        if begins and not sys.flags.safe_path and sys.path[:1] == [here]:
            del sys.path[0]
        if "" in entries and here not in map(os.path.abspath, filter(None, entries)):
            sys.path.remove(here)


def _runs_module() -> bool:
    """Return whether the module that `python -m` is to run is one of this package."""
    option = sys.orig_argv[-len(sys.argv)]  # A word of its own, or it stands behind the `m`.
    module = option.partition("m")[2] if option.startswith("-") else option
    return module.partition(".")[0] == PACKAGE


def _main() -> None:
    """Load the package that this file lies in, and run that module of it."""
    from importlib.util import module_from_spec, spec_from_file_location
    from runpy import run_module

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
