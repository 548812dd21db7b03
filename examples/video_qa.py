"""Ask about a video: `python examples/video_qa.py [VIDEO QUESTION...]`.

The processor samples two frames per second. Two frames form one temporal patch, and the prompt has
a timestamp before each patch, so the model can tell when something happens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vlm_serve import Pipeline, SamplingParams

VIDEO = Path(__file__).parent / "media" / "change.mp4"
QUESTIONS = (
    "What happens?",
    "What color is the circle at the start?",
    "What color is the circle at the end?",
    "When does the color change?",
    "Does the color change in the first or in the second half?",
    "Who drew this?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("video", nargs="?", type=Path, default=VIDEO)
    parser.add_argument("question", nargs="*", default=QUESTIONS, help="each asked by itself")
    given = parser.parse_args()
    greedy = SamplingParams(temperature=0.0, max_tokens=96)
    with Pipeline("demo") as pipe:
        for question in given.question:
            content = [
                {"type": "video", "video": given.video},
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
