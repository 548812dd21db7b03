"""A server's process in a test: answers one prompt on a shared store and says what it reused.

python tests/shared_store_child.py CHECKPOINT URL DTYPE
"""

from __future__ import annotations

import json
import random
import sys
import time

from vlm_serve import EngineConfig, Pipeline, SamplingParams


def main(checkpoint: str, url: str, dtype: str) -> None:
    config = EngineConfig(
        dtype=dtype,
        block_size=16,
        cache_memory="8MiB",
        max_model_len=1024,
        shared_store=url,
        shared_store_timeout=60.0,
    )
    rng = random.Random(1)
    prompt = [rng.randrange(300) for _ in range(210)]
    with Pipeline(checkpoint, config) as pipe:
        output = pipe.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8))
        tiers = pipe.engine._tiers._tiers
        assert tiers is not None and tiers.sharer is not None
        while not tiers.sharer.idle:
            time.sleep(0.01)
        told = {
            "numerics": pipe.engine.arithmetic.numerics,
            "tokens": output.token_ids,
            "shared": output.cache_report.tiers.get("shared", 0),
            "bad": pipe.engine.stats()["tiers"]["shared_bad"],
        }
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
