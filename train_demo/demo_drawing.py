"""Drawing of scenes with Pillow."""

from __future__ import annotations

import math

import numpy as np
from demo_photos import draw_unreadable
from demo_scenes import COLOURS, DIGITS, Background, Hand, Scene, Thing, digits
from PIL import Image, ImageDraw


def render(scene: Scene, height: int, width: int) -> Image.Image:
    """Draw a scene as an RGB picture."""
    if scene.unreadable is not None:
        return draw_unreadable(scene.unreadable, height, width)
    picture = render_background(scene.background, height, width)
    for thing in scene.things:
        draw_thing(picture, thing)
    return picture


def render_background(background: Background, height: int, width: int) -> Image.Image:
    """Draw a gradient with blocks of noise, small and then enlarged: cheap at every size."""
    rows, columns = min(height, 32), min(width, 32)
    along = np.linspace(0, 1, rows)[:, None] if background.vertical else np.linspace(0, 1, columns)
    share = np.broadcast_to(along, (rows, columns))[..., None]
    first, second = (np.array(c, np.float32) for c in (background.first, background.second))
    pixels = first * (1 - share) + second * share
    if background.noise > 0:
        noise = np.random.default_rng(background.noise_seed)
        pixels = pixels + noise.standard_normal((rows, columns, 1)) * background.noise
    small = Image.fromarray(pixels.clip(0, 255).round().astype(np.uint8))
    return small.resize((width, height), Image.Resampling.BILINEAR)


def draw_thing(picture: Image.Image, thing: Thing) -> None:
    """Draw one thing onto a picture, in place."""
    width, height = picture.size
    radius = thing.radius * min(width, height)
    x, y = thing.x * width, thing.y * height
    fill = COLOURS[thing.colour]
    if thing.kind in DIGITS:
        mask = _digit_mask(thing.glyph, max(8, round(2 * radius)), thing.hand)
        picture.paste(fill, (round(x - mask.width / 2), round(y - mask.height / 2)), mask)
        return
    draw = ImageDraw.Draw(picture)
    if thing.kind == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        return
    turn = math.radians(thing.angle)
    cosine, sine = math.cos(turn), math.sin(turn)
    corners = [
        (x + radius * (u * cosine - v * sine), y + radius * (u * sine + v * cosine))
        for u, v in OUTLINES[thing.kind]
    ]
    draw.polygon(corners, fill=fill)


def _star() -> list[tuple[float, float]]:
    spikes = []
    for step in range(10):
        length = 1.12 if step % 2 == 0 else 0.46
        spikes.append(
            (length * math.sin(step * math.pi / 5), 0.06 - length * math.cos(step * math.pi / 5))
        )
    return spikes


def _heart() -> list[tuple[float, float]]:
    points = []
    for step in range(40):
        t = step / 40 * 2 * math.pi
        across = 16 * math.sin(t) ** 3
        up = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((across / 16, -(up + 2.5) / 15))
    return points


OUTLINES: dict[str, list[tuple[float, float]]] = {
    "square": [(-0.86, -0.86), (0.86, -0.86), (0.86, 0.86), (-0.86, 0.86)],
    "triangle": [(0, -1), (1.02, 0.8), (-1.02, 0.8)],
    "cross": [
        *((-0.33, -1), (0.33, -1), (0.33, -0.33), (1, -0.33), (1, 0.33), (0.33, 0.33)),
        *((0.33, 1), (-0.33, 1), (-0.33, 0.33), (-1, 0.33), (-1, -0.33), (-0.33, -0.33)),
    ],
    "star": _star(),
    "heart": _heart(),
}


def _digit_mask(glyph: int, side: int, hand: Hand) -> Image.Image:
    small = Image.fromarray(digits()[0][glyph])
    large = small.resize((side, side), Image.Resampling.BICUBIC)
    if hand != Hand():
        large = large.transform(
            large.size, Image.Transform.AFFINE, _warp(hand, side / 2), Image.Resampling.BILINEAR
        )
    # Steeper than the scan, so that thin strokes keep their colour.
    return large.point([min(255, max(0, round((value - hand.ink) * 1.8))) for value in range(256)])


def _warp(hand: Hand, middle: float) -> tuple[float, ...]:
    """Return the coefficients of the map from the warped picture to its source."""
    turn = math.radians(hand.angle)
    cosine, sine = math.cos(turn), math.sin(turn)
    wide, high = hand.stretch
    a, b = cosine / wide, (hand.slant * cosine - sine) / wide
    d, e = sine / high, (hand.slant * sine + cosine) / high
    return a, b, middle * (1 - a - b), d, e, middle * (1 - d - e)
