"""Convert a checkpoint to a GGUF file with llama.cpp's own converter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

OUT_TYPES = {"float32": "f32", "bfloat16": "bf16"}

# The converter knows a tokenizer by a hash over some text. That of the benchmark's checkpoint is
# none that it knows, and all prompts are token ids: it is given the name of Qwen3.5's.
_PROGRAM = """
import runpy, sys
folder = sys.argv[1]
sys.path.insert(0, folder)
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda *_: "qwen35"
converter = folder + "/convert_hf_to_gguf.py"
sys.argv = [converter, *sys.argv[2:]]
runpy.run_path(converter, run_name="__main__")
"""


class ConversionError(Exception):
    """The converter failed; the message is the last line that it printed."""


def convert(
    source: Path, checkpoint: Path, dtype: str, folder: Path, *, tower: bool = False
) -> Path:
    """Writes the language model, or the vision tower, into a GGUF file.

    Args:
        source: llama.cpp's source tree.
        checkpoint: directory in Hugging Face's format.
        dtype: "float32" or "bfloat16".
        folder: where the file goes.

    Raises:
        ConversionError: the converter is not there or did not understand the checkpoint.
    """
    target = folder / f"{'tower-' if tower else ''}{dtype}.gguf"
    # What is cut off halfway does not look like a result.
    partial = target.with_suffix(".part")
    flags = ["--outfile", str(partial), "--outtype", OUT_TYPES[dtype]]
    if tower:
        flags.append("--mmproj")
    elif has_state(checkpoint):
        # Such models may predict further tokens; the benchmarks' checkpoints have no layers for it.
        flags.append("--no-nextn")
    _run([sys.executable, "-c", _PROGRAM, str(source), str(checkpoint), *flags], partial)
    return partial.replace(target)


def has_state(checkpoint: Path) -> bool:
    """Whether a checkpoint has layers with a recurrent state."""
    return '"linear_num_key_heads"' in (checkpoint / "config.json").read_text()


def quantise(source: Path, plain: Path, kind: str) -> Path:
    """A GGUF file in another of llama.cpp's types, such as Q4_K_M, beside the one that is given.

    Raises:
        ConversionError: no build of the tree has `llama-quantize`, or it fails.
    """
    target, tools = plain.with_name(f"{kind}.gguf"), source.glob("build*/bin/llama-quantize")
    tool = next(tools, None)
    if tool is None:
        raise ConversionError(f"no llama-quantize in {source / 'build/bin'}")
    part = target.with_suffix(".part")
    _run([str(tool), str(plain), str(part), kind], part)
    return part.replace(target)


def _run(command: list[str], target: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not target.is_file():
        lines = done.stderr.strip().splitlines()
        raise ConversionError(lines[-1] if lines else f"no file after exit {done.returncode}")
