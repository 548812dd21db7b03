"""llama.cpp with an adapter written by its own converter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.engine_gguf import ConversionError, convert
from common.engine_peers import LlamaCpp, find_llama, llama

# As in engine_gguf.py: the benchmark's tokenizer is none that the converter knows, and its
# checkpoints have no layers that predict further tokens: this converter has no option for that.
_PROGRAM = """
import runpy, sys
folder = sys.argv[1]
sys.path.insert(0, folder)
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda *_: "qwen35"
TextModel.no_mtp = True
converter = folder + "/convert_lora_to_gguf.py"
sys.argv = [converter, *sys.argv[2:]]
runpy.run_path(converter, run_name="__main__")
"""


@contextmanager
def llama_with(
    adapter: Path | None,
    checkpoint: Path,
    dtype: str,
    folder: Path,
    source: str | None,
    *,
    threads: int,
    length: int,
) -> Iterator[LlamaCpp]:
    """llama.cpp on a checkpoint, with an adapter of PEFT or none.

    Raises:
        Unavailable: it is not there.
        ConversionError: a converter did not understand the checkpoint or the adapter.
    """
    tree, binary = find_llama(source)
    folder.mkdir(exist_ok=True)
    model = folder / f"{dtype}.gguf"
    model = model if model.is_file() else convert(tree, checkpoint, dtype, folder)
    more = {} if adapter is None else {"--lora": _converted(tree, adapter, checkpoint, folder)}
    with llama(binary, model, length=length, threads=threads, more=more) as peer:
        yield peer


def _converted(tree: Path, adapter: Path, checkpoint: Path, folder: Path) -> Path:
    target = folder / f"{adapter.name}-lora.gguf"
    flags = ["--base", str(checkpoint), "--outtype", "f32", "--outfile", str(target)]
    command = [sys.executable, "-c", _PROGRAM, str(tree), *flags, str(adapter)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not target.is_file():
        lines = done.stderr.strip().splitlines()
        raise ConversionError(lines[-1] if lines else f"no file after exit {done.returncode}")
    return target
