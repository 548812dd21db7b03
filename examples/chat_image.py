"""Ask questions about one picture: `python examples/chat_image.py [PICTURE QUESTION...]`.

All questions share the picture, so only the first one computes it. The cache report gives the
reused tokens of each prompt, and whether the picture was decoded and encoded again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vlm_serve import Pipeline, SamplingParams

PICTURE = Path(__file__).parent / "media" / "shapes.png"
QUESTIONS = (
    "Describe the picture.",
    "How many shapes are there?",
    "What color is the star?",
    "What is at the bottom right?",
    "What shape is blue?",
    "Where is the triangle?",
    "Is there a yellow square?",
    "Is the star bigger than the circle?",
    "What color is the heart?",
    "Who drew this?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("picture", nargs="?", type=Path, default=PICTURE)
    parser.add_argument("question", nargs="*", default=QUESTIONS, help="each asked by itself")
    given = parser.parse_args()
    greedy = SamplingParams(temperature=0.0, max_tokens=96)
    with Pipeline("demo") as pipe:
        for question in given.question:
            content = [
                {"type": "image", "image": given.picture},
                {"type": "text", "text": question},
            ]
            output = pipe.chat([{"role": "user", "content": content}], greedy)
            usage = output.usage
            print(f"{question}\n  {output.text}")
            print(
                f"  ({usage.cached_tokens} of {usage.prompt_tokens} prompt tokens from the cache)"
            )


if __name__ == "__main__":
    main()
