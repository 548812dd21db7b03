"""Use openai-python with a running vlm-serve: an image, a stream, a tool and the cache report.

vlm-serve serve demo &
pip install openai
python examples/openai_client.py [examples/media/photo.jpg] [--base-url http://127.0.0.1:8000/v1]
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
from pathlib import Path
from typing import Any

try:
    from openai import OpenAI
except ModuleNotFoundError:
    raise SystemExit("this example needs OpenAI's library: pip install openai") from None

PICTURE = next((Path(__file__).parent / "media").glob("*.png"), None)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def image_part(path: Path) -> dict[str, Any]:
    kind = mimetypes.guess_type(path.name)[0] or "image/jpeg"
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def ask(client: OpenAI, model: str, part: dict[str, Any], question: str) -> None:
    """Ask one streamed question about the picture; print the answer and the cache report."""
    messages: Any = [{"role": "user", "content": [part, {"type": "text", "text": question}]}]
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"cache_report": True},
    )
    print(f"> {question}")
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            cached = chunk.usage.prompt_tokens_details.cached_tokens
            print(f"\n  {cached} of {chunk.usage.prompt_tokens} prompt tokens from the cache")
            print(f"  report: {getattr(chunk, 'cache_report', None)}")


def offer_a_tool(client: OpenAI, model: str) -> None:
    """Offer a function to call; the small demo model mostly ignores it."""
    tools: Any = [WEATHER]
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=tools,
        max_tokens=64,
        temperature=0,
    )
    message: Any = answer.choices[0].message
    for call in message.tool_calls or []:
        print(f"tool call: {call.function.name}({call.function.arguments})")
    if not message.tool_calls:
        print(f"no tool call, but: {message.content!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("picture", type=Path, nargs="?", default=PICTURE)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none")
    options = parser.parse_args()
    if options.picture is None:
        parser.error("name a picture")
    client = OpenAI(base_url=options.base_url, api_key=options.api_key)
    model = client.models.list().data[0].id
    part = image_part(options.picture)
    ask(client, model, part, "What is in this picture?")
    ask(client, model, part, "Which colours do you see?")  # The picture is cached now.
    offer_a_tool(client, model)


if __name__ == "__main__":
    main()
