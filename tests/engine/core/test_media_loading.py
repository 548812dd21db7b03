"""Media decoded again because what was computed from them has been evicted."""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial

import pytest
from make_checkpoint import make_checkpoint
from parity import greedy
from PIL import Image
from waiting import WAIT_SECONDS, wait_for

from vlm_serve.engine.engine import Engine
from vlm_serve.engine.requests.outputs import Delta
from vlm_serve.engine.start import build
from vlm_serve.options.config import EngineConfig
from vlm_serve.preprocess.identity.prompt import Prompt
from vlm_serve.preprocess.media.limits import MediaLimits


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = make_checkpoint(tmp_path_factory.mktemp("loading"))
    config = EngineConfig(
        device="cpu", dtype="float32", block_size=16, max_model_len=2048, cache_memory="32MiB"
    )
    # A busy machine may need longer for large pictures than a server gives them.
    patient = partial(MediaLimits, max_image_decode_seconds=WAIT_SECONDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "MediaLimits", patient)
        made = Engine.from_checkpoint(str(path), config)
    yield made
    made.close()


def known_picture(engine: Engine, side: int) -> Prompt:
    """A prompt whose picture is known by its hashes alone, with so many pixels a side."""
    buffer = io.BytesIO()
    Image.new("L", (side, side), side % 251).save(buffer, "PNG")
    messages = [{"role": "user", "content": [{"type": "image", "image": buffer.getvalue()}]}]
    engine.preprocessor.prepare(messages)
    prompt = engine.preprocessor.prepare(messages)
    assert not prompt.media[0].ready
    return prompt


def test_a_request_waits_for_its_picture(engine: Engine) -> None:
    deltas: list[Delta] = []
    engine.submit(known_picture(engine, 2500), greedy(2), deltas.append)
    wait_for(lambda: any(delta.finish_reason is not None for delta in deltas))
    assert deltas[-1].error is None
    assert deltas[-1].cache_report is not None
    assert deltas[-1].cache_report.media_decoded == 1


def test_decoding_again_ends_with_its_request(engine: Engine) -> None:
    deltas: list[Delta] = []
    decoders = engine.preprocessor._decoders
    prompt = known_picture(engine, 8000)  # takes long to decode
    request_id = engine.submit(prompt, greedy(2), deltas.append)
    wait_for(lambda: len(decoders.pids) == 2)  # the light one has passed it on
    engine.abort(request_id)
    wait_for(lambda: not decoders.heavy.busy)
    assert len(decoders.pids) == 1
    assert not prompt.media[0].ready
    assert [delta.finish_reason for delta in deltas] == ["abort"]
    engine.check()
