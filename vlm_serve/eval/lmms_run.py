"""Start lmms-eval with the additional model `vlm_serve`.

    python -m vlm_serve.eval.lmms_run --model vlm_serve --model_args model=demo --tasks ...

All arguments are those of lmms-eval.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Run lmms-eval's command line, which must be installed beside vlm-serve."""
    if find_spec("lmms_eval") is None:
        sys.exit("lmms-eval is not installed beside vlm-serve (docs/evaluation.md says how)")
    from lmms_eval.cli.dispatch import main as lmms_main
    from lmms_eval.models import MODEL_REGISTRY_V2
    from lmms_eval.models.registry_v2 import ModelManifest

    path = "vlm_serve.eval.lmms_model.VlmServe"
    MODEL_REGISTRY_V2.register_manifest(ModelManifest("vlm_serve", chat_class_path=path))
    lmms_main()


if __name__ == "__main__":
    main()
