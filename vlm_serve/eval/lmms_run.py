"""Starts lmms-eval with one more model, `vlm_serve`: `python -m vlm_serve.eval.lmms_run --model
vlm_serve --model_args model=demo --tasks ...`. All arguments are lmms-eval's."""

from __future__ import annotations


def main() -> None:
    """Runs lmms-eval's command line; it has to be installed beside vlm-serve."""
    from lmms_eval.cli.dispatch import main as lmms_main
    from lmms_eval.models import MODEL_REGISTRY_V2
    from lmms_eval.models.registry_v2 import ModelManifest

    path = "vlm_serve.eval.lmms_model.VlmServe"
    MODEL_REGISTRY_V2.register_manifest(ModelManifest("vlm_serve", chat_class_path=path))
    lmms_main()


if __name__ == "__main__":
    main()
