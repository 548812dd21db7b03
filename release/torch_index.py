"""Choose the package index that `make` installs torch from, before anything is installed.

    python release/torch_index.py INDEX

INDEX is PyTorch's index of CPU builds. It is printed if torch should come from there, and nothing
if torch should come from pip's default index. Standard error gives the choice and the reason.

On Linux the public index only has torch with CUDA. Without an NVIDIA driver this wastes 2.3 GB of
download and 3.3 GB of disk. This script uses Python's standard library alone.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import os
import platform
import queue
import re
import shutil
import ssl
import sys
import sysconfig
import threading
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
PATIENCE = 5.0
"""Time limit for the index's whole response, in seconds."""
MOST_BYTES = 1 << 25
"""Size limit of that response; PyTorch's takes a hundredth of it."""
DRIVER_FILES = (
    "proc/driver/nvidia/version",
    "dev/nvidiactl",
    "dev/nvmap",  # Boards with an integrated GPU.
    "usr/lib/wsl/lib/libcuda.so.1",  # Windows' driver, as WSL shows it.
)
"""Files below the root that show an NVIDIA driver."""
ELSEWHERE = "torch comes from pip's default index"
CUDA = "the public index has it with CUDA: 2.8 GB to download and 5.4 GB of disk in all"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("index", metavar="INDEX")
    parser.add_argument("--root", type=Path, default=Path("/"), help="where to look for a driver")
    options = parser.parse_args()
    chosen, reason = choose(options.index, options.root)
    print(f"vlm-serve: {reason}.", file=sys.stderr)
    if chosen:
        print(options.index)


def choose(index: str, root: Path) -> tuple[bool, str]:
    """Decide whether torch comes from the index of CPU builds; the reason is a sentence."""
    if sys.platform != "linux":
        return False, f"{ELSEWHERE}, which has one build for this system"
    driver = find_driver(root)
    if driver is not None:
        return False, f"an NVIDIA driver is here ({driver}), so {ELSEWHERE}: {CUDA}"
    problem, name = find_problem(index, pinned_version()), _shown(index)
    if problem is not None:
        return False, f"no NVIDIA driver is here, but {name} {problem}, so {ELSEWHERE}: {CUDA}"
    return True, f"no NVIDIA driver is here, so torch is a CPU build, from {name}"


def find_driver(root: Path) -> str | None:
    """Return the evidence of an NVIDIA driver on this machine; None if there is none.

    The program `nvidia-smi` counts as a driver. A false positive installs unused libraries; a
    missed driver would cost the GPU.
    """
    for name in DRIVER_FILES:
        if (root / name).exists():
            return f"/{name}"
    return shutil.which("nvidia-smi")


def pinned_version() -> str:
    """Return the version of torch in constraints.txt."""
    found = re.search(r"^torch==(\S+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, "constraints.txt pins torch"
    return found[1]


def find_problem(index: str, version: str) -> str | None:
    """Return why an index is unusable, to follow its name in a sentence; None if it is usable.

    The request runs in a thread and is given up after PATIENCE: a socket's own timeout restarts
    with every byte, and name resolution has none.
    """
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_find_problem(index, version)), daemon=True).start()
    try:
        return answers.get(timeout=PATIENCE)
    except queue.Empty:
        return f"has not answered within {PATIENCE:g} s"


def _find_problem(index: str, version: str) -> str | None:
    try:
        opener = urllib.request.build_opener(*_handlers())
        with opener.open(_request(f"{index.rstrip('/')}/torch/"), timeout=2 * PATIENCE) as answer:
            page = answer.read(MOST_BYTES).decode(errors="replace")
    except urllib.error.HTTPError as error:
        return f"answers with status {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"cannot be read ({getattr(error, 'reason', error)})"
    if not re.search(wheel_pattern(version), page):
        python = ".".join(map(str, sys.version_info[:2]))
        return f"has no torch {version} for Python {python} on {platform.machine()}"
    return None


def _handlers() -> list[urllib.request.BaseHandler]:
    """Return handlers with the certificates and the proxy of pip's variables."""
    trust = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=trust)]
    proxy = os.environ.get("PIP_PROXY")
    if proxy:
        handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
    return handlers


def _request(url: str) -> urllib.request.Request:
    """Build a request with the URL's name and password, as pip does; a redirect gets neither."""
    user, at, _ = urlsplit(url).netloc.rpartition("@")
    request = urllib.request.Request(_shown(url))
    if at:
        name, _, password = user.partition(":")
        token = base64.b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {token}")
    return request


def _shown(url: str) -> str:
    """Return a URL without name and password."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def wheel_pattern(version: str) -> str:
    """Return a pattern of the wheel names of a version that this Python can install."""
    threads = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    return (
        rf"\btorch-{re.escape(version)}(?:(?:\+|%2B)cpu)?-{tag}-{tag}{threads}"
        rf"-[\w.]*linux[\w.]*_{re.escape(platform.machine())}\.whl"
    )


if __name__ == "__main__":
    main()
