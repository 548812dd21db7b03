"""Write the small samples for `vlm-serve eval`:
`python train_demo/make_eval_samples.py examples/eval`.

A file in LongBench v2's format about invented harbour logs, and pictures and clips of the demo
model's scenes with questions. The samples show that answers are equal with and without caching.
Their scores say nothing about a model.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from pathlib import Path
from typing import Any

from demo_clips import Clip, draw_clip, frame_count, render_clip
from demo_drawing import render
from demo_questions import pick
from demo_scenes import draw_scene
from demo_videos import pick_clip
from demo_words import Turn
from draw_examples import write_video

HARBOURS = ("Ardholm", "Birk Sound", "Castor Bay", "Dunmere", "Eastwick", "Fern Quay")
SHIPS = ("Heron", "Petrel", "Dipper", "Plover", "Siskin", "Curlew", "Avocet", "Wigeon")
CARGOES = ("salt", "barley", "slate", "timber", "wool", "apples", "rope", "glass")
WINDS = ("north", "north-east", "east", "south-east", "south", "south-west", "west", "north-west")
LENGTHS = {"short": 24, "medium": 60, "long": 110}
"""Days of a log, by LongBench v2's word for how long a text is."""
PICTURES, CLIPS, QUESTIONS = 4, 3, 4


def log_book(rng: random.Random, harbour: str, days: int) -> tuple[str, list[tuple[str, str]]]:
    """Return a harbour's log, and the ship and cargo of each day."""
    lines, ships = [f"Log of the harbour of {harbour}, kept by its pilots."], []
    for day in range(1, days + 1):
        ship, cargo = rng.choice(SHIPS), rng.choice(CARGOES)
        ships.append((ship, cargo))
        lines.append(
            f"Day {day}. Wind from the {rng.choice(WINDS)}, {rng.randint(2, 30)} knots. "
            f"The {ship} came in with {rng.randint(3, 90)} tons of {cargo} and left on the tide."
        )
    return "\n".join(lines), ships


def question_about(rng: random.Random, number: int) -> dict[str, Any]:
    """Return one question in the fields of the data set, with its own log."""
    length = list(LENGTHS)[number % len(LENGTHS)]
    harbour = HARBOURS[number % len(HARBOURS)]
    text, ships = log_book(rng, harbour, LENGTHS[length])
    day = rng.randint(1, len(ships))
    ship, cargo = ships[day - 1]
    hard = number % 2 == 1
    choices = rng.sample([each for each in CARGOES if each != cargo], 3) + [cargo]
    rng.shuffle(choices)
    asked = f"What did the {ship} carry on day {day}?"
    if hard:
        asked = f"What was carried by the ship that came in the day after day {day - 1}?"
    return {
        "_id": f"sample-{number + 1}",
        "domain": "Single-Document QA",
        "sub_domain": "Harbour log",
        "difficulty": "hard" if hard else "easy",
        "length": length,
        "question": asked,
        **{f"choice_{letter}": each for letter, each in zip("ABCD", choices, strict=True)},
        "answer": "ABCD"[choices.index(cargo)],
        "context": text,
    }


def write_questions(out: Path) -> None:
    rng = random.Random("harbour logs")
    questions = [question_about(rng, number) for number in range(6)]
    (out / "longbench.json").write_text(json.dumps(questions, indent=1) + "\n", encoding="utf-8")


def write_pictures(out: Path) -> None:
    with (out / "pictures.jsonl").open("w", encoding="utf-8") as file:
        for number in range(1, PICTURES + 1):
            rng = random.Random(f"eval picture {number}")
            scene = draw_scene(rng, "test")
            name = f"picture-{number}.png"
            render(scene, 128, 128).save(out / name)
            for turn in distinct(pick(rng, scene) for _ in range(40)):
                row = {"image": name, "question": turn.question, "answer": turn.answer}
                file.write(json.dumps(row) + "\n")


def write_clips(out: Path) -> None:
    with (out / "videos.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("video", "question", "answer"))
        for number in range(1, CLIPS + 1):
            rng = random.Random(f"eval clip {number}")
            clip = small_clip(rng)
            name = f"clip-{number}.mp4"
            frames = render_clip(clip, list(range(frame_count(clip))), 96, 96)
            write_video(out / name, frames, clip.frame_rate)
            for turn in distinct(pick_clip(rng, clip) for _ in range(40)):
                rows.writerow((name, turn.question, turn.answer))


def small_clip(rng: random.Random) -> Clip:
    """Return a clip of a small file: few frames, a plain background."""
    while True:
        clip = draw_clip(rng)
        if clip.frame_rate <= 8 and clip.background.noise == 0:
            return clip


def distinct(turns: Any) -> list[Turn]:
    """Return the first `count` distinct questions."""
    found: dict[str, Turn] = {}
    for turn in turns:
        found.setdefault(turn.question, turn)
    return list(found.values())[:QUESTIONS]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", metavar="FOLDER", type=Path, help="where to write the samples")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    write_questions(out)
    write_pictures(out)
    write_clips(out)


if __name__ == "__main__":
    main()
