"""Change an engine's weights and let it sleep again and again, and see whether its memory grows.

    python benchmarks/weight_updates.py [--updates 100]

The weights of a small random checkpoint with a vision tower change in turns to those of its folder
and to embeddings of ever new values, and an answer is asked for behind each update. With those of
the folder the engine then gives back all of its memory, wakes up and answers again. Resident memory
is printed behind every tenth update. The run fails if it is more than 2 % apart between the tenth
and the last one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
from common.machine import describe
from families import SPECS
from load import resident_bytes
from make_checkpoint import make_checkpoint
from safetensors.torch import load_file

from vlm_serve import EngineConfig, Pipeline, SamplingParams

MOST = 0.02
"""Growth between the tenth and the last update, as a share of the former."""
ANSWER = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def update(pipe: Pipeline, folder: Path, number: int) -> None:
    """Change the weights: of even numbers to the folder's."""
    if number % 2 == 0:
        pipe.engine.update_weights(folder)
        return
    tensors = load_file(next(folder.glob("*.safetensors")))
    part = {name: each for name, each in tensors.items() if "embed_tokens" in name}
    scaled = ((name, each * (1 + number / 1000)) for name, each in part.items())
    pipe.engine.update_weights(scaled)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--updates", type=int, default=100)
    given = parser.parse_args()
    config = EngineConfig(device="cpu", cache_memory="2MiB", allow_weight_updates=True)
    sizes = dict[int, int]()
    print(describe(os.cpu_count() or 1), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name) / "model", SPECS["dense"])
        with Pipeline(folder, config) as pipe:
            for number in range(1, given.updates + 1):
                update(pipe, folder, number)
                pipe.chat(f"What is {number}?", ANSWER)
                if number % 2 == 0:
                    pipe.engine.sleep(("kv_cache", "weights"))
                    pipe.engine.wake_up()
                    pipe.chat(f"What was {number}?", ANSWER)
                if number % 10 == 0:
                    sizes[number] = resident_bytes(os.getpid())
                    print(f"{number:>4} updates, {sizes[number] / 2**20:.1f} MiB", flush=True)
    first, *_, last = sizes.values()
    print(f"resident memory behind the last update over the tenth: {last / first:.4f}")
    return int(abs(last / first - 1) > MOST)


if __name__ == "__main__":
    sys.exit(main())
