"""Media that lower tiers know: nothing is decoded, nothing encoded, and the answer is that of a
cold run, whatever is wrong with what they know."""

from __future__ import annotations

import asyncio
import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import SPECS
from make_checkpoint import make_checkpoint
from parity import greedy, tapped
from parity_cases import photograph, user, video

from vlm_serve.cache.tiers.disk import FILE_NAME
from vlm_serve.cache.tiers.entry import Entry, Kind, Sealed, seal, unseal
from vlm_serve.cache.tiers.host import HostStore
from vlm_serve.engine.engine import Engine
from vlm_serve.engine.start.build import build
from vlm_serve.options.config import EngineConfig
from vlm_serve.pipeline.pipeline import Output, Pipeline
from vlm_serve.preprocess.media.raw_index import pack_record, unpack_record

NAMES = [
    "dense, equal heads, one kv head",
    "vl, features behind all layers but the last",
    "minicpm, 4x, tied",
]
MEDIA = [photograph("coffee.png"), photograph("rocket.jpg"), video("carphone_pristine.mp4")]
QUESTION = [user(*MEDIA, "What do they share?")]
MOVED = [user("Something else comes first here.", *MEDIA, "What do they share?")]
"""The same media where none of their KV is of use."""


@pytest.fixture(scope="module", params=NAMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("media"), SPECS[request.param])


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("dense"), SPECS[NAMES[0]])


def opened(checkpoint: Path | str, folder: Path | None = None, **options: object) -> Pipeline:
    settings: dict[str, object] = {
        "block_size": 16,
        "cache_memory": "64MiB",
        "max_model_len": 4096,
        "disk_cache_path": str(folder) if folder is not None else None,
    }
    config = EngineConfig(**(settings | options))  # type: ignore[arg-type]
    return Pipeline.from_engine(Engine(build(str(checkpoint), config, poison=True)))


def answer(pipe: Pipeline, chat: list[dict[str, Any]]) -> tuple[Output, torch.Tensor]:
    """With the logits that its tokens were chosen from."""
    with tapped(pipe.engine) as tap:
        output = pipe.chat(chat, greedy(6))
        (logits,) = tap.take()
    pipe.engine.check()
    return output, logits


def same(found: tuple[Output, torch.Tensor], expected: tuple[Output, torch.Tensor]) -> bool:
    return found[0].token_ids == expected[0].token_ids and torch.equal(found[1], expected[1])


def worked(pipe: Pipeline) -> tuple[int, int]:
    """Media decoded and spans encoded since the start."""
    stats = pipe.engine.stats()
    return stats["num_decoded_media"], stats["num_encoded_spans"]


@pytest.fixture(scope="module")
def seen(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What an engine leaves behind that has answered, and cold answers."""
    folder, found = tmp_path_factory.mktemp("seen"), dict[str, Any]()
    with opened(checkpoint, folder) as pipe:
        found["cold"] = answer(pipe, QUESTION)
        assert worked(pipe) == (3, len(found["cold"][0].cache_report.media))
    with opened(checkpoint) as pipe:
        found["moved"] = answer(pipe, MOVED)
    yield found | {"folder": folder}


def copied(seen: dict[str, Any], folder: Path) -> Path:
    shutil.copytree(seen["folder"], folder, dirs_exist_ok=True)
    return folder


def test_after_a_restart_nothing_is_decoded_or_encoded(
    checkpoint: Path, seen: dict[str, Any], tmp_path: Path
) -> None:
    with opened(checkpoint, copied(seen, tmp_path)) as pipe:
        hit = answer(pipe, QUESTION)
        assert same(hit, seen["cold"])
        report = hit[0].cache_report
        last = report.media[-1]
        assert report.boundary >= last.offset + last.length
        assert (report.media_decoded, report.media_encoded) == (0, 0)
        assert worked(pipe) == (0, 0)
        assert pipe.engine.stats()["uploads"] == {"tiers": 3}


def test_embeddings_come_up_where_kv_is_of_no_use(
    checkpoint: Path, seen: dict[str, Any], tmp_path: Path
) -> None:
    with opened(checkpoint, copied(seen, tmp_path)) as pipe:
        forecast = pipe.probe(MOVED)
        assert {media.source for media in forecast.media} <= {"disk", "cached"}
        assert (forecast.media_decoded, forecast.media_encoded) == (0, 0)
        moved = answer(pipe, MOVED)
        assert same(moved, seen["moved"])
        assert {media.source for media in moved[0].cache_report.media} == {"disk"}
        assert moved[0].cache_report.media_skipped == 3
        assert worked(pipe) == (0, 0)
        spans = len({media.hash for media in moved[0].cache_report.media})
        assert pipe.engine.stats()["embeddings"]["disk"] == spans
        assert pipe.engine.stats()["held_bytes"]["embeddings"] == pipe.engine._media.cache.used
        again = answer(pipe, MOVED)
        assert same(again, moved)


Row = tuple[int, bytes, bytes, bytes]
"""Of the disk tier's file: number, key, header, payload."""


def rows_of(folder: Path, kind: Kind) -> list[Row]:
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection:
        return connection.execute(
            "SELECT number, key, header, payload FROM entries WHERE kind & 255 = ?", (kind.value,)
        ).fetchall()


def write(folder: Path, number: int, sealed: Sealed) -> None:
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection, connection:
        connection.execute(
            "UPDATE entries SET header = ?, payload = ? WHERE number = ?",
            (sealed.header, sealed.payload, number),
        )


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A bit, a byte more, the end cut off, or noise."""
    changed = bytearray(data)
    how = rng.randrange(4)
    if how == 0:
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    elif how == 1:
        changed += b"\0"
    elif how == 2:
        del changed[rng.randrange(len(changed)) :]
    else:
        changed = bytearray(rng.randbytes(len(changed)))
    return bytes(changed)


@pytest.mark.parametrize("seed", range(3))
def test_damage_is_a_counted_miss(
    checkpoint: Path, seen: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    folder, rng = copied(seen, tmp_path), random.Random(seed)
    count = 0
    for kind in (Kind.UPLOAD, Kind.EMBEDDINGS):
        rows = rows_of(folder, kind)
        assert rows
        for number, _, header, payload in rows:
            part = rng.random() < 0.5
            head = damaged(header, rng) if part else header
            write(folder, number, Sealed(head, payload if part else damaged(payload, rng)))
            count += 1
    with opened(checkpoint, folder) as pipe:
        moved = answer(pipe, MOVED)
        assert same(moved, seen["moved"])
        assert pipe.engine.stats()["tiers"]["counts"]["bad"] == count
        assert worked(pipe) == (3, count - 3)
    with opened(checkpoint, folder) as pipe:  # it has been replaced by what is right
        assert same(answer(pipe, MOVED), seen["moved"])
        assert worked(pipe) == (0, 0) and "bad" not in pipe.engine.stats()["tiers"]["counts"]


def resealed(pipe: Pipeline, row: Row, kind: Kind, **new: Any) -> Sealed:
    """The entry of a row with other content, and a checksum that is right."""
    tiers = pipe.engine._tiers._tiers
    assert tiers is not None
    origin = tiers.stack.origin
    entry: Entry = unseal(Sealed(row[2], row[3]), origin.id(kind, row[1]), origin)
    return seal(replace(entry, **new), origin)


def test_content_of_another_form_is_a_counted_miss(
    checkpoint: Path, seen: dict[str, Any], tmp_path: Path
) -> None:
    """Intact, and not what this engine would have made."""
    folder = copied(seen, tmp_path)
    embeddings, uploads = (rows_of(folder, kind) for kind in (Kind.EMBEDDINGS, Kind.UPLOAD))
    with opened(checkpoint, tmp_path / "other") as pipe:
        changes: list[dict[str, Any]] = [
            {"layout": "float16[1, 1]"},
            {"num_tokens": 1},
            {"payload": b"\0" * 64},
        ]
        for index, row in enumerate(embeddings):
            sealed = resealed(pipe, row, Kind.EMBEDDINGS, **changes[index % 3])
            write(folder, row[0], sealed)
        for row in uploads:
            write(folder, row[0], resealed(pipe, row, Kind.UPLOAD, source=row[3] + b"\0" * 8))
    with opened(checkpoint, folder) as pipe:
        assert same(answer(pipe, MOVED), seen["moved"])
        counts = pipe.engine.stats()["tiers"]["counts"]
        assert counts["bad"] == len(embeddings) + len(uploads)
        assert worked(pipe) == (3, len(embeddings))


@pytest.mark.parametrize("lie", ["another picture", "another size"])
def test_a_record_that_lies_changes_no_answer(dense: Path, tmp_path: Path, lie: str) -> None:
    """Decoding does not confirm it: the request goes on with what is right, and so do others."""
    chat = [user("Look:", photograph("coffee.png"), "How many cups?")]
    with opened(dense) as pipe:
        cold = answer(pipe, chat)
    with opened(dense, tmp_path) as pipe:
        pipe.engine.preprocessor.prepare(chat)  # decodes it, and encodes nothing
        tiers = pipe.engine._tiers._tiers
        assert tiers is not None and tiers.stack.drain(30)
    (row,) = rows_of(tmp_path, Kind.UPLOAD)
    truth = unpack_record(row[3])
    assert truth is not None
    wrong = replace(truth, hashes=(b"?" * 32,))
    if lie == "another size":
        wrong = replace(wrong, grid=(1, 4, 4))
    sealed = resealed(pipe, row, Kind.UPLOAD, source=pack_record(wrong))
    write(tmp_path, row[0], sealed)
    for unconfirmed in (1, 0):
        with opened(dense, tmp_path) as pipe:
            found = answer(pipe, chat)
            assert same(found, cold)
            assert found[0].usage.prompt_tokens == cold[0].usage.prompt_tokens
            stats = pipe.engine.stats()
            assert stats["uploads"].get("unconfirmed", 0) == unconfirmed
            assert stats["tiers"]["counts"].get("bad", 0) == unconfirmed
            assert stats["num_decoded_media"] == unconfirmed and not stats["num_running"]


def test_host_memory_takes_what_is_evicted(dense: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm_serve.engine.start.build.EMBEDDING_CACHE_BYTES", 1)
    with opened(dense) as pipe:
        cold = answer(pipe, MOVED)
    with opened(dense, host_cache_memory="64MiB") as pipe:
        pipe.chat(QUESTION, greedy(1))
        moved = answer(pipe, MOVED)
        assert same(moved, cold)
        assert {media.source for media in moved[0].cache_report.media} == {"host"}
        encoded = worked(pipe)[1]
        pipe.engine.flush()
        assert pipe.engine.stats()["tiers"]["host_bytes"] == 0
        assert same(answer(pipe, MOVED), cold)
        assert worked(pipe)[1] == 2 * encoded


def test_a_flush_forgets_embeddings_and_uploads(dense: Path, tmp_path: Path) -> None:
    with opened(dense, tmp_path) as pipe:
        pipe.chat(QUESTION, greedy(1))
        before = worked(pipe)
        pipe.engine.flush()
        pipe.engine.close()
    assert not rows_of(tmp_path, Kind.UPLOAD) and not rows_of(tmp_path, Kind.EMBEDDINGS)
    with opened(dense, tmp_path) as pipe:
        pipe.chat(QUESTION, greedy(1))
        assert worked(pipe) == before


def test_tenants_share_neither(dense: Path, tmp_path: Path) -> None:
    with opened(dense, tmp_path) as pipe:
        for salt in ("", "a", "b"):
            pipe.chat(QUESTION, greedy(1), cache_salt=salt)
        spans = len(pipe.chat(QUESTION, greedy(1)).cache_report.media)
        assert worked(pipe) == (9, 3 * spans)


def test_a_tier_that_fails_or_is_slow_changes_no_answer(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs its time limit once; then it is left alone."""
    # A machine with other work takes a while to begin a call: behind its limit there is none.
    monkeypatch.setattr(HostStore, "time_limit", 1.0)
    monkeypatch.setattr(HostStore, "private", False)  # so that it is asked
    get, calls = HostStore.contains, list[str]()
    with opened(dense) as pipe:
        cold = answer(pipe, MOVED)
    for error in (OSError("injected"), None):

        async def contains(self: HostStore, ids: Any, error: Any = error) -> Any:
            calls.append("contains")
            if error is not None:
                raise error
            await asyncio.sleep(60)
            return await get(self, ids)

        monkeypatch.setattr(HostStore, "contains", contains)
        with opened(dense, host_cache_memory="64MiB") as pipe:
            assert same(answer(pipe, MOVED), cold)
            assert pipe.engine.stats()["tiers"]["counts"]["failed_host"] == 1
    assert len(calls) == 2


@pytest.mark.usefixtures("compiler")
def test_the_demo_too(tmp_path: Path) -> None:
    folder = Path(__file__).resolve().parents[3] / "examples" / "media"
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": str(folder / "star.png")},
        {"type": "video", "video": str(folder / "change.mp4")},
    ]
    chats = [[user(*parts, "What happens?")], [user("Say,", *parts, "what happens?")]]
    with opened("demo") as pipe:
        cold = [answer(pipe, chat) for chat in chats]
    with opened("demo", tmp_path) as pipe:
        answer(pipe, chats[0])
    with opened("demo", tmp_path) as pipe:
        assert all(same(answer(pipe, chat), each) for chat, each in zip(chats, cold, strict=True))
        assert worked(pipe) == (0, 0)
