"""Pixels on their way to a device that works behind the host: values, and who waits for what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fake_device import FakeDevice
from queued_device import QueuedCopies, QueuedPixels

from vlm_serve.engine.steps import pixel_copies
from vlm_serve.engine.steps.pixel_copies import sent_bytes
from vlm_serve.engine.steps.tier_copies import CopyStream
from vlm_serve.preprocess.media.processors import PixelConfig, normalise, value_table

CONFIG = PixelConfig(
    patch_size=2,
    temporal_patch_size=1,
    merge_size=1,
    do_resize=False,
    resample=3,
    do_rescale=True,
    rescale_factor=1 / 255,
    do_normalize=True,
    mean=(0.5, 0.48, 0.41),
    std=(0.5, 0.27, 0.26),
    min_pixels=1,
    max_pixels=1 << 20,
)


def pixels_of(count: int, seed: int = 0) -> torch.Tensor:
    """Patches of 3 channels of 4 pixels."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count, 12), dtype=torch.uint8, generator=draw)


def normalised(pixels: torch.Tensor, config: PixelConfig = CONFIG) -> torch.Tensor:
    """Return the values that the host computes, channel by channel."""
    whole = pixels.view(len(pixels), 3, 4).transpose(0, 1)
    frames = normalise(whole.reshape(1, 3, -1, 4), config)
    return frames[0].transpose(0, 1).reshape(len(pixels), 12)


def copies(dtype: torch.dtype = torch.float32) -> QueuedPixels:
    device = FakeDevice()
    return QueuedPixels(QueuedCopies(device), device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("at_a_time", [1, 30, 1 << 20])
def test_values_have_the_bits_of_the_host_s(dtype: torch.dtype, at_a_time: int) -> None:
    own, table, found = copies(dtype), value_table(CONFIG), list[torch.Tensor]()
    assert table is not None and table.shape == (3, 256)
    with patch.object(pixel_copies, "AT_A_TIME", at_a_time):
        sent = [own.send(pixels_of(count, count), table) for count in (5, 1, 8)]
        found = [each() for each in sent]
    for count, values in zip((5, 1, 8), found, strict=True):
        assert torch.equal(values, normalised(pixels_of(count, count)).to(dtype))


def test_every_value_of_every_channel() -> None:
    table = value_table(CONFIG)
    assert table is not None
    values = torch.arange(256, dtype=torch.uint8).expand(3, 256)
    assert torch.equal(table, normalise(values.reshape(1, 3, 16, 16), CONFIG).view(3, 256))
    assert value_table(CONFIG) is table, "a device keeps it"


@pytest.mark.parametrize("name", ["do_rescale", "do_normalize"])
def test_what_is_not_rescaled_or_normalised_has_no_table(name: str) -> None:
    settings: dict[str, Any] = {
        field: getattr(CONFIG, field) for field in CONFIG.__dataclass_fields__
    }
    assert value_table(PixelConfig(**{**settings, name: False})) is None


def test_values_themselves_are_sent_too() -> None:
    values = normalised(pixels_of(6))
    assert torch.equal(copies(torch.bfloat16).send(values, None)(), values.bfloat16())


def test_a_step_waits_for_its_own_pixels() -> None:
    own = copies()
    table, fake = value_table(CONFIG), own._fake
    arrived = own.send(pixels_of(4), table)
    done = list[bool]()
    fake.queue(lambda: done.append(True))
    fake.current.synchronize()
    stream: Any = own._stream._stream
    assert done and stream.queued, "a step without pixels waits for none"
    assert torch.equal(arrived(), normalised(pixels_of(4)))
    assert not stream.queued


def test_pixels_that_are_read_before_they_have_come_are_seen() -> None:
    load: Callable[..., Any] = CopyStream.load

    def unawaited(*arguments: Any) -> Callable[[], None]:
        load(*arguments)
        return lambda: None

    with patch.object(CopyStream, "load", unawaited):
        found = copies().send(pixels_of(4), value_table(CONFIG))()
    assert not torch.equal(found, normalised(pixels_of(4)))


def test_memory_beside_the_values() -> None:
    assert sent_bytes(1000) == 5000
    assert sent_bytes(1 << 30) == (1 << 30) + (32 << 20)
