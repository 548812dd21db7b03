"""Send damaged pictures, videos and documents to the decoders: a medium or an error each time.

    python benchmarks/media_files.py [--files 5000] [--seed 0]

A file is made from its seed. What is neither a medium nor an error with a sentence is printed with
its seed, and so is growth of this process's memory over the second half. Exits with 1 for any.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from collections import Counter

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
from common.machine import describe
from mutated_media import Mutated, mutated

from vlm_serve.errors import MediaError
from vlm_serve.preprocess.media.decoders import Decoders
from vlm_serve.preprocess.media.images import PdfPage
from vlm_serve.preprocess.media.limits import MediaLimits
from vlm_serve.system.stopping import Stop

LIMITS = MediaLimits(max_decode_seconds=20.0, max_image_decode_seconds=20.0)
MOST_GROWTH = 32 << 20
"""Bytes of growth of the highest memory over the second half."""


def read(decoders: Decoders, file: Mutated) -> str:
    """Decode the first and the last picture; return the outcome."""
    try:
        data = file.data
        if file.modality == "document":
            data = PdfPage(data, decoders.pages(LIMITS, data) - 1).packed
        if file.modality != "video":
            with decoders.image(data, LIMITS, Stop()) as pixels:
                return "read" if pixels.size else "empty"
        with decoders.video(file.data, None, LIMITS, Stop()) as video:
            frames = list(video.frames([0, len(video.times) - 1]))
            return "read in part" if video.cut_short else "read" if len(frames) == 2 else "empty"
    except MediaError as error:
        damaged = "damaged or takes too much memory" in error.message
        return "decoder ended" if damaged else "refused"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--files", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    options = parser.parse_args()
    print(describe(1))
    outcomes: dict[str, Counter[str]] = {}
    wrong, peak, began = 0, 0, time.monotonic()
    decoders = Decoders()
    for index in range(options.files):
        file = mutated(options.seed + index)
        try:
            outcome = read(decoders, file)
        except Exception as error:
            outcome, wrong = "wrong", wrong + 1
            print(f"seed {options.seed + index}, {file.kind}: {error!r}", flush=True)
        outcomes.setdefault(file.kind, Counter())[outcome] += 1
        if index == options.files // 2:
            gc.collect()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    decoders.close()
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - peak
    print("| kind | read | read in part | refused | decoder ended |")
    print("|---|---|---|---|---|")
    for kind, counts in sorted(outcomes.items()):
        cells = [counts[name] for name in ("read", "read in part", "refused", "decoder ended")]
        print(f"| {kind} | " + " | ".join(map(str, cells)) + " |")
    print(f"{options.files} files in {time.monotonic() - began:.0f} s, {wrong} wrong")
    print(f"highest memory grew by {growth >> 20} MiB over the second half")
    return 1 if wrong or growth > MOST_GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
