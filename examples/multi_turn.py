"""A conversation about two pictures, streamed: `python examples/multi_turn.py`.

Each turn sends the whole history again, as every chat client does. All but the newest question
comes from the cache, including the model's own answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlm_serve import Pipeline, SamplingParams

MEDIA = Path(__file__).parent / "media"
PICTURES = (MEDIA / "star.png", MEDIA / "heart.png")
QUESTIONS = (
    "What is in the second picture?",
    "Which picture has the star?",
    "What shape is in the first picture?",
    "What color is the heart in the second picture?",
    "Is there a red star in the second picture?",
)


def main() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=96)
    messages: list[dict[str, Any]] = []
    with Pipeline("demo") as pipe:
        for question in QUESTIONS:
            content: list[dict[str, Any]] = [{"type": "text", "text": question}]
            if not messages:
                content = [{"type": "image", "image": path} for path in PICTURES] + content
            messages.append({"role": "user", "content": content})
            print(question, end="\n  ")
            answer = thought = ""
            for delta in pipe.stream(messages, greedy):
                print(delta.text, end="", flush=True)
                answer += delta.text
                thought += delta.reasoning
                if delta.usage is not None:
                    usage = delta.usage
            print(f"\n  ({usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached)")
            messages.append({"role": "assistant", "content": answer, "reasoning": thought or None})


if __name__ == "__main__":
    main()
