"""Starts lmms-eval with the model `vlm_serve`, where torchvision lacks its compiled part."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import oracle

from vlm_serve.eval.lmms_run import main

if __name__ == "__main__":
    oracle.prepare_torchvision()
    main()
