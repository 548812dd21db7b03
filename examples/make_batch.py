"""Write a batch file that asks about the example pictures:
`python examples/make_batch.py examples/batch/pictures.jsonl`."""

from __future__ import annotations

import argparse
import base64
import json
from pathlib import Path
from typing import Any

MEDIA = Path(__file__).parent / "media"
QUESTIONS = {
    "shapes.png": ("How many objects are in the picture?", "What color is the star?"),
    "star.png": ("What object is in the picture?", "What color is the star?"),
    "heart.png": ("What object is in the picture?", "What color is the heart?"),
}


def line(custom_id: str, body: dict[str, Any]) -> str:
    """Return a line of the file. All have one route, as `/v1/batches` wants it."""
    request = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": body,
    }
    return json.dumps(request) + "\n"


def chat(picture: str, question: str) -> dict[str, Any]:
    """Return a greedy chat request that embeds the picture."""
    data = base64.b64encode((MEDIA / picture).read_bytes()).decode()
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "text", "text": question},
    ]
    messages = [{"role": "user", "content": content}]
    return {"messages": messages, "max_completion_tokens": 32, "temperature": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", metavar="FILE", type=Path, help="JSON lines to write")
    out: Path = parser.parse_args().out
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as file:
        # Pictures alternate on purpose: run-batch finds a better order.
        for number in range(2):
            for picture, questions in QUESTIONS.items():
                name = f"{Path(picture).stem}-{number + 1}"
                file.write(line(name, chat(picture, questions[number])))
        text = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
        file.write(line("text", text))


if __name__ == "__main__":
    main()
