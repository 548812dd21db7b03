"""Check LiteLLM and LangChain with a running vlm-serve: a streamed chat about an image and a tool.

Both are too large for a development dependency, so run this by hand:

    vlm-serve serve demo &
    pip install litellm mcp langchain-openai  # LiteLLM imports mcp
    python examples/clients_check.py [--base-url http://127.0.0.1:8000/v1]

The demo model never calls tools on its own, so `tool_choice` forces the call.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import json
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).parent / "media" / "heart.png"
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "report_colour",
        "description": "Reports the main colour of a picture",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"type": "string", "enum": ["red", "yellow", "blue"]}},
            "required": ["colour"],
        },
    },
}
FORCED = {"type": "function", "function": {"name": "report_colour"}}


def messages() -> list[dict[str, Any]]:
    url = "data:image/png;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Colour?"}]
    return [{"role": "user", "content": parts}]


def checked(client: str, name: str, arguments: str) -> None:
    assert name == "report_colour", f"{client}: {name!r}"
    assert json.loads(arguments)["colour"] in ("red", "yellow", "blue"), f"{client}: {arguments!r}"
    print(f"{client}: {name}({arguments})")


def with_litellm(base_url: str, model: str, key: str) -> None:
    litellm = importlib.import_module("litellm")
    options = {"api_base": base_url, "api_key": key, "temperature": 0, "max_tokens": 64}
    chunks = list(
        litellm.completion(
            model=f"openai/{model}",
            messages=messages(),
            tools=[TOOL],
            tool_choice=FORCED,
            stream=True,
            **options,
        )
    )
    whole = litellm.stream_chunk_builder(chunks)
    (call,) = whole.choices[0].message.tool_calls
    checked("LiteLLM", call.function.name, call.function.arguments)


def with_langchain(base_url: str, model: str, key: str) -> None:
    langchain = importlib.import_module("langchain_openai")
    chat = langchain.ChatOpenAI(
        base_url=base_url, model=model, api_key=key, temperature=0, max_tokens=64
    ).bind_tools([TOOL], tool_choice="report_colour")
    whole: Any = None
    for chunk in chat.stream(messages()):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    checked("LangChain", call["name"], json.dumps(call["args"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args()
    for check in (with_litellm, with_langchain):
        check(options.base_url, options.model, options.api_key)


if __name__ == "__main__":
    main()
