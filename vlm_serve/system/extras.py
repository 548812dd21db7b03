"""Optional packages: how to install what a feature needs."""

from __future__ import annotations

import shlex
from importlib import metadata


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra.

    It names them, since it has to work where vlm-serve came from a checkout or from a file that no
    index has.
    """
    try:
        wanted = metadata.requires("vlm-serve") or ()
    except metadata.PackageNotFoundError:
        wanted = ()
    packages = [
        shlex.quote(requirement.partition(";")[0].strip())
        for requirement in wanted
        if f'extra == "{extra}"' in requirement.replace("'", '"')
    ]
    return f"pip install {' '.join(packages) or shlex.quote(f'vlm-serve[{extra}]')}"
