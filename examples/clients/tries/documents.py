"""Tools that read documents or remember conversations."""

from __future__ import annotations

import shutil
from typing import Any

from common import CLIENT, KEY, MODEL, PICTURE, SEE, URL, holds, step


def mem0() -> None:
    import os

    os.environ["MEM0_TELEMETRY"] = "false"
    from mem0 import Memory

    class Embedder:
        """Vectors of letters: the server has no embeddings of texts."""

        def embed(self, text: str, action: object = None) -> list[float]:
            return [text.count(letter) + 0.01 for letter in "abcdefghijklmnop"]

        def embed_batch(self, texts: list[str], action: object = None) -> list[list[float]]:
            return [self.embed(text) for text in texts]

    store: dict[str, Any] = {"path": "vectors", "embedding_model_dims": 16}
    llm = {"model": MODEL, "openai_base_url": URL, "api_key": KEY}
    memory = Memory.from_config(
        {
            "llm": {"provider": "openai", "config": llm},
            "embedder": {"provider": "openai", "config": {"api_key": KEY, "embedding_dims": 16}},
            "vector_store": {"provider": "qdrant", "config": store},
            "history_db_path": "history.db",
        }
    )
    memory.embedding_model = Embedder()
    with step("takes a fact from a conversation"):
        memory.add([{"role": "user", "content": "REMEMBER Paris"}], user_id="a")
        found = memory.search("Where?", filters={"user_id": "a"})["results"]
        holds(found, "lives in Paris")


def markitdown() -> None:
    import openai
    from markitdown import MarkItDown

    client = openai.OpenAI(base_url=URL, api_key=KEY)
    shutil.copy(PICTURE, "heart.png")
    with step("describes a picture"):
        reader = MarkItDown(llm_client=client, llm_model=MODEL, llm_prompt=SEE)
        holds(reader.convert("heart.png").text_content, "heart")


def docling() -> None:
    from docling.datamodel.base_models import InputFormat
    from docling.datamodel.pipeline_options import VlmPipelineOptions
    from docling.datamodel.pipeline_options_vlm_model import ApiVlmOptions, ResponseFormat
    from docling.document_converter import DocumentConverter, ImageFormatOption
    from docling.pipeline.vlm_pipeline import VlmPipeline

    options = VlmPipelineOptions(enable_remote_services=True)
    options.vlm_options = ApiVlmOptions(
        url=f"{URL}/chat/completions",
        params={"model": MODEL},
        prompt=SEE,
        timeout=200,
        response_format=ResponseFormat.MARKDOWN,
    )
    form = ImageFormatOption(pipeline_cls=VlmPipeline, pipeline_options=options)
    with step("reads a picture as a page"):
        reader = DocumentConverter(format_options={InputFormat.IMAGE: form})
        holds(reader.convert(PICTURE).document.export_to_markdown(), "heart")


globals()[CLIENT.replace("-", "_")]()
