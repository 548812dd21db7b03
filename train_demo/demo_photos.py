"""Pictures that the model cannot read: empty ones, textures, clutter and photographs.

Natural pictures are imitated: noise that is stronger the coarser it is, dead leaves (forms that
cover each other, of all sizes), and crops of the two photographs of scikit-learn.
"""

from __future__ import annotations

import functools
import math
import random

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

Array = np.ndarray
SIDE = 128


def draw_unreadable(seed: int, height: int, width: int) -> Image.Image:
    """Draw one such picture."""
    rng = random.Random(f"unreadable:{seed}")
    make = rng.choices((_empty, _noise, _leaves, _crop, _page), (1.4, 2, 2.5, 3.5, 0.6))[0]
    picture = make(rng, np.random.default_rng(rng.randrange(2**31)))
    if rng.random() < 0.12:
        picture = picture.convert("L").convert("RGB")
    return picture.resize((width, height), Image.Resampling.BICUBIC)


def _colour(rng: random.Random) -> tuple[int, int, int]:
    return rng.randrange(256), rng.randrange(256), rng.randrange(256)


def _blend(first: Image.Image, second: Image.Image, share: float) -> Image.Image:
    return Image.blend(first, second, share)


def _empty(rng: random.Random, draw: np.random.Generator) -> Image.Image:
    """Draw one colour, or a gradient, with or without noise."""
    one = np.array(_colour(rng) if rng.random() < 0.6 else [rng.choice((0, 128, 255))] * 3)
    two = np.array(_colour(rng)) if rng.random() < 0.35 else one
    share = np.linspace(0, 1, SIDE)[:, None, None] * np.ones((1, SIDE, 1))
    if rng.random() < 0.5:
        share = share.transpose(1, 0, 2)
    noise = draw.normal(size=(SIDE, SIDE, 1)) * max(0.0, rng.uniform(-10, 14))
    return _picture(one + (two - one) * share + noise)


def _picture(values: Array) -> Image.Image:
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


def natural_noise(rng: random.Random, draw: np.random.Generator, channels: int) -> Array:
    """Return values around 0 with the spectrum of natural pictures, [SIDE, SIDE, channels]."""
    frequency = np.hypot(np.fft.fftfreq(SIDE)[:, None], np.fft.fftfreq(SIDE)[None]) + 1 / SIDE
    power = frequency ** -rng.uniform(0.7, 1.8)
    shape = (SIDE, SIDE, channels)
    spectrum = np.fft.fft2(draw.normal(size=shape), axes=(0, 1)) * power[..., None]
    values = np.fft.ifft2(spectrum, axes=(0, 1)).real
    return np.asarray(values / values.std())


def _noise(rng: random.Random, draw: np.random.Generator) -> Image.Image:
    grey, tint = natural_noise(rng, draw, 1), natural_noise(rng, draw, 3)
    base = np.array(_colour(rng)) * 0.5 + 64
    return _picture(base + grey * rng.uniform(20, 70) + tint * rng.uniform(5, 35))


def _leaves(rng: random.Random, draw: np.random.Generator) -> Image.Image:
    """Draw many forms on each other, the smaller the more of them, in a few related colours."""
    palette = [np.array(_colour(rng)) for _ in range(rng.randint(2, 6))]
    picture = _noise(rng, draw)
    pen = ImageDraw.Draw(picture)
    for _ in range(rng.randint(12, 120)):
        size = min(0.5 * SIDE, 3 / (rng.random() + 0.02))
        x, y = rng.uniform(0, SIDE), rng.uniform(0, SIDE)
        shade = rng.choice(palette) * rng.uniform(0.5, 1.3) + rng.uniform(-25, 25)
        fill = (int(shade[0]) % 256, int(shade[1]) % 256, int(shade[2]) % 256)
        if rng.random() < 0.5:
            tall = size * rng.uniform(0.4, 1.6)
            pen.ellipse((x - size, y - tall, x + size, y + tall), fill=fill)
        else:
            corners = rng.randint(3, 7)
            angles = sorted(rng.uniform(0, 2 * math.pi) for _ in range(corners))
            pen.polygon(
                [(x + size * math.cos(a), y + size * math.sin(a)) for a in angles], fill=fill
            )
    if rng.random() < 0.7:
        picture = picture.filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 3)))
    texture = natural_noise(rng, draw, 1) * rng.uniform(0, 30)
    return _picture(np.asarray(picture) + texture)


def _page(rng: random.Random, draw: np.random.Generator) -> Image.Image:
    """Draw lines of a text, stripes or a grid."""
    paper, ink = (rng.randint(200, 255),) * 3, (rng.randint(0, 90),) * 3
    picture = Image.new("RGB", (SIDE, SIDE), paper if rng.random() < 0.8 else ink)
    pen = ImageDraw.Draw(picture)
    step = rng.randint(4, 16)
    grid = rng.random() < 0.3
    for y in range(step, SIDE, step):
        if grid:
            pen.line((0, y, SIDE, y), fill=ink)
            pen.line((y, 0, y, SIDE), fill=ink)
            continue
        x = rng.randint(2, 12)
        while x < SIDE * rng.uniform(0.7, 1):
            wide = rng.randint(1, step)
            pen.rectangle((x, y, x + wide, y + max(1, step // 2)), fill=ink)
            x += wide + rng.randint(1, max(2, step // 2))
    return _picture(np.asarray(picture) + draw.normal(size=(SIDE, SIDE, 1)) * rng.uniform(0, 12))


@functools.cache
def _photographs() -> tuple[Image.Image, ...]:
    from sklearn.datasets import load_sample_images

    return tuple(Image.fromarray(each) for each in load_sample_images().images)


def _crop(rng: random.Random, draw: np.random.Generator) -> Image.Image:
    """Cut a part out of a photograph and change its colours; or lay two parts over each other."""
    picture = _part(rng)
    if rng.random() < 0.5:
        picture = _blend(picture, _part(rng), rng.uniform(0.2, 0.8))
    if rng.random() < 0.35:
        picture = _blend(picture, _leaves(rng, draw), rng.uniform(0.2, 0.7))
    values: Array = np.asarray(picture).astype(np.float32)
    if rng.random() < 0.7:
        values = values[..., rng.sample(range(3), 3)]
    if rng.random() < 0.2:
        values = 255 - values
    values = (values / 255) ** math.exp(rng.uniform(-0.8, 0.8)) * 255
    gains = np.array([rng.uniform(0.6, 1.3) for _ in range(3)])
    return _picture(values * gains + rng.uniform(-30, 30))


def _part(rng: random.Random) -> Image.Image:
    photo = rng.choice(_photographs())
    side = round(math.exp(rng.uniform(math.log(50), math.log(420))))
    x, y = rng.randint(0, photo.width - side), rng.randint(0, photo.height - side)
    part = photo.crop((x, y, x + side, y + side)).resize((SIDE, SIDE))
    if rng.random() < 0.5:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return part.rotate(rng.choice((0, 0, 0, 90, 180, 270)))
