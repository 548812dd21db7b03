"""llama.cpp's library, as npm ships it for this machine, by ctypes: no build, and no other package.

Only what is the same in every version is relied on: functions by name, and the first fields of
structs. Structs by value are larger than the library's, which reads and writes only its own part.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

PACKAGE = "@node-llama-cpp/linux-x64@3.22.1"
FOLDER = Path(__file__).resolve().parent.parent.parent / "build" / "libllama"
"""Where `fetch` puts it. Nothing else fetches."""
FTYPES = {"Q4_0": 2, "Q8_0": 7, "Q3_K": 12, "Q4_K": 15, "Q5_K": 17, "Q6_K": 18, "Q2_K": 10}
FTYPES |= {"IQ3_XXS": 23, "IQ4_NL": 25, "IQ3_S": 26, "IQ4_XS": 30, "TQ1_0": 36, "TQ2_0": 37}
"""What the library's quantiser calls mixes of mostly these types that need no data to calibrate."""


class _Struct(ctypes.Structure):
    _fields_ = (("head", ctypes.c_int32 * 4), ("rest", ctypes.c_byte * 1008))


def fetch() -> Path:
    """Fetch the library with npm, unless it is there; its folder."""
    if not found(FOLDER):
        npm = shutil.which("npm")
        if npm is None:
            raise SystemExit("npm is not here: it fetches llama.cpp's library")
        FOLDER.mkdir(parents=True, exist_ok=True)
        command = [npm, "pack", PACKAGE, "--silent", "--pack-destination", str(FOLDER)]
        subprocess.run(command, check=True, timeout=600, capture_output=True)
        (packed,) = FOLDER.glob("*.tgz")
        with tarfile.open(packed) as archive:
            archive.extractall(FOLDER, filter="data")
        packed.unlink()
    return FOLDER


def found(folder: Path) -> list[Path]:
    """The libraries of a folder: ggml's and llama.cpp's; none if it has not been fetched."""
    names = ("libggml.*so", "libllama.*so")
    return [path for name in names for path in sorted(folder.rglob(name))]


class Library:
    """The library in a folder."""

    def __init__(self, folder: Path = FOLDER) -> None:
        ggml, llama = found(folder)
        self._ggml = ctypes.CDLL(str(ggml), ctypes.RTLD_GLOBAL)
        self._llama = ctypes.CDLL(str(llama))
        self._log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(
            lambda *_: None
        )
        self._llama.llama_log_set(self._log, None)
        self._ggml.ggml_backend_load_all_from_path(str(ggml.parent).encode())
        self._llama.llama_backend_init()
        for name in ("model", "context"):
            getattr(self._llama, f"llama_{name}_default_params").restype = _Struct
        for name in ("model_load_from_file", "init_from_model", "model_get_vocab"):
            getattr(self._llama, f"llama_{name}").restype = ctypes.c_void_p
        self._llama.llama_batch_get_one.restype = _Struct
        self._llama.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
        self._llama.llama_model_quantize_default_params.restype = _Struct

    def quantise(self, source: Path, target: Path, kind: str) -> Path:
        """A file with most weights of a type."""
        how = self._llama.llama_model_quantize_default_params()
        how.head[0], how.head[1] = 1, FTYPES[kind]
        names = str(source).encode(), str(target).encode()
        if self._llama.llama_model_quantize(*names, ctypes.byref(how)):
            raise RuntimeError(f"llama.cpp does not make {kind} of {source.name}")
        return target

    def logits(self, file: Path, tokens: list[int]) -> npt.NDArray[np.float32]:
        """The logits behind a prompt."""
        llama, pointer = self._llama, ctypes.c_void_p
        model = llama.llama_model_load_from_file(
            str(file).encode(), llama.llama_model_default_params()
        )
        if not model:
            raise RuntimeError(f"llama.cpp does not load {file.name}")
        size = llama.llama_vocab_n_tokens(pointer(llama.llama_model_get_vocab(pointer(model))))
        context = llama.llama_init_from_model(pointer(model), llama.llama_context_default_params())
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = llama.llama_batch_get_one(ids, len(tokens))
        if llama.llama_decode(pointer(context), batch):
            raise RuntimeError("llama.cpp does not compute the prompt")
        found_logits = llama.llama_get_logits_ith(pointer(context), -1)
        copied = np.ctypeslib.as_array(found_logits, (size,)).copy()
        llama.llama_free(pointer(context))
        llama.llama_model_free(pointer(model))
        return copied
