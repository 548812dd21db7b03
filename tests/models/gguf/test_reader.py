"""A damaged or lying file is refused in one sentence, without reading beyond it."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_blocks import encode

from vlm_serve.errors import CheckpointError
from vlm_serve.models.gguf.files import ModelFiles
from vlm_serve.models.gguf.folder import _Model
from vlm_serve.models.gguf.reader import GgufFile

TOKENS = ["a", "b", "c", "ab", "<|im_end|>", "<|endoftext|>"]
MUTATIONS = 2000
MOST_MEMORY = 64 << 20


def small_file(path: Path) -> Path:
    """A model with one layer, a few tokens and blocks."""
    writer = gguf.GGUFWriter(path, "qwen3vl")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_key_length(32)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e4)
    writer.add_rope_dimension_sections([8, 4, 4, 0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1, 1, 1, 1, 3, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(4)
    writer.add_chat_template("{{ messages[0].content }}")
    numbers = np.random.default_rng(0)
    for name, shape, kind in (
        ("token_embd.weight", (6, 32), Kind.F16),
        ("output_norm.weight", (32,), Kind.F32),
        ("blk.0.attn_norm.weight", (32,), Kind.F32),
        ("blk.0.attn_q.weight", (32, 32), Kind.Q8_0),
        ("blk.0.attn_output.weight", (32, 32), Kind.Q4_0),
    ):
        values = numbers.normal(size=shape).astype(np.float32)
        writer.add_tensor(name, encode(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    return small_file(tmp_path / "whole.gguf").read_bytes()


def read_all(path: Path) -> None:
    """All that loading asks of a file."""
    model = _Model(ModelFiles((path,), None))
    model.contents()
    tensors = model.tensors()
    for name in tensors.names():
        assert tuple(tensors.tensor(name).shape) == tensors.shape(name)


def refused(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_all(path)
    assert "\n" not in caught.value.message and len(caught.value.message) < 400
    return caught.value.message


def test_a_whole_file(whole: bytes, tmp_path: Path) -> None:
    read_all(tmp_path / "whole.gguf")
    file = GgufFile(tmp_path / "whole.gguf")
    assert file.metadata["tokenizer.ggml.tokens"] == TOKENS
    assert file.metadata["qwen3vl.attention.layer_norm_rms_epsilon"] == 1e-6
    assert file.tensors["blk.0.attn_q.weight"].shape == (32, 32)


@pytest.mark.parametrize(
    ("what", "content"),
    [
        ("cannot be read: it is empty", b""),
        ("is not a GGUF file", b"GGML" + bytes(60)),
        ("damaged: the header reaches beyond its end", b"GGUF\x03\0\0\0"),
        ("has version 1, which is not supported", b"GGUF\x01\0\0\0" + bytes(16)),
        ("is big-endian", b"GGUF\0\0\0\x03" + bytes(16)),
        ("its header announces 9223372036854775807 tensors",
         b"GGUF\x03\0\0\0" + struct.pack("<QQ", (1 << 63) - 1, 0)),
        ("its header announces 1000 keys", b"GGUF\x03\0\0\0" + struct.pack("<QQ", 0, 1000)),
        ("the name of key 0 reaches beyond its end",
         b"GGUF\x03\0\0\0" + struct.pack("<QQQ", 0, 1, 1 << 20) + bytes(64)),
        ("more than 2097152 texts or 64 MiB",
         b"GGUF\x03\0\0\0" + struct.pack("<QQQ", 0, 1, 1 << 40) + bytes(64)),
        ("k has the unknown type 77",
         b"GGUF\x03\0\0\0" + struct.pack("<QQQ1sI", 0, 1, 1, b"k", 77) + bytes(64)),
        ("k has more than 4194304 numbers",
         b"GGUF\x03\0\0\0" + struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 4, 1 << 60) + bytes(64)),
        ("k reaches beyond its end",
         b"GGUF\x03\0\0\0" + struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 8, 1 << 60) + bytes(64)),
        ("k is an array of the unsupported type 9",
         b"GGUF\x03\0\0\0" + struct.pack("<QQQ1sIIQ", 0, 1, 1, b"k", 9, 9, 1) + bytes(64)),
    ],
)  # fmt: skip
def test_headers_that_lie(what: str, content: bytes, tmp_path: Path) -> None:
    assert what in refused(tmp_path / "model.gguf", content)


def test_every_end(whole: bytes, tmp_path: Path) -> None:
    """A file that is cut off anywhere is refused; padding behind the last tensor is no content."""
    path = tmp_path / "model.gguf"
    for size in range(0, len(whole) - 32, 37):
        message = refused(path, whole[:size])
        assert "damaged" in message or "cannot be read" in message


@pytest.mark.parametrize(
    ("what", "old", "new"),
    [
        ("blk.0.attn_q.weight reaches beyond its end", struct.pack("<IQQI", 2, 32, 32, 8),
         struct.pack("<IQQI", 2, 32, 1 << 62, 8)),
        ("blk.0.attn_q.weight of type Q8_0 has the shape [33, 32]",
         struct.pack("<IQQI", 2, 32, 32, 8), struct.pack("<IQQI", 2, 33, 32, 8)),
        ("blk.0.attn_q.weight has 9 dimensions", struct.pack("<IQQI", 2, 32, 32, 8),
         struct.pack("<IQQI", 9, 32, 32, 8)),
        ("blk.0.attn_q.weight in model.gguf has the type Q8_1, which is not supported; "
         "supported are F32,", struct.pack("<IQQI", 2, 32, 32, 8),
         struct.pack("<IQQI", 2, 32, 32, 9)),
        ("it has the tensor blk.0.attn_norm.weight twice",
         struct.pack("<Q", 18) + b"output_norm.weight",
         struct.pack("<Q", 22) + b"blk.0.attn_norm.weight"),
        ("token 1 of model.gguf stands there twice", struct.pack("<Q", 1) + b"b",
         struct.pack("<Q", 1) + b"a"),
        ("merge 0 of model.gguf does not join two tokens", b"a b", b"a-b"),
        ("qwen3vl.block_count in model.gguf must be a positive integer, not 0",
         b"block_count" + struct.pack("<II", 4, 1), b"block_count" + struct.pack("<II", 4, 0)),
        ("model.gguf lacks qwen3vl.context_length", b"context_length", b"context_lengxx"),
        ("the architecture 'qwen9vl' of model.gguf is not supported; supported are qwen35",
         b"qwen3vl", b"qwen9vl"),
        ("pre 'qwen9' in model.gguf is not supported", b"qwen2", b"qwen9"),
        ("blk.0.attn_q.weight lies over another tensor", struct.pack("<QIQ", 32, 8, 640),
         struct.pack("<QIQ", 32, 8, 512)),
    ],
)  # fmt: skip
def test_entries_that_lie(what: str, old: bytes, new: bytes, whole: bytes, tmp_path: Path) -> None:
    assert old in whole
    assert what in refused(tmp_path / "model.gguf", whole.replace(old, new))


def test_mutations(whole: bytes, tmp_path: Path) -> None:
    """Whatever bytes change, a file is read or refused, with little memory."""
    path, dice, read = tmp_path / "model.gguf", random.Random(0), 0
    header = whole.index(b"blk.0.attn_output.weight") + 64
    tracemalloc.start()
    try:
        for _ in range(MUTATIONS):
            path.write_bytes(mutated(whole, header, dice))
            try:
                read_all(path)
                read += 1
            except CheckpointError as error:
                assert "\n" not in error.message, error.message
                assert len(error.message) < 600, error.message
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()
    assert 0 < read < MUTATIONS


def mutated(whole: bytes, header: int, dice: random.Random) -> bytes:
    changed = bytearray(whole)
    for _ in range(dice.randint(1, 4)):
        at, kind = dice.randrange(4, header), dice.randrange(5)
        if kind == 0:
            changed[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            changed[at] = dice.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif kind == 2:
            changed[at : at + 8] = struct.pack("<Q", dice.choice((0, 1, 1 << 31, (1 << 64) - 1)))
        elif kind == 3:
            del changed[at : at + dice.randint(1, 16)]
        else:
            changed[at:at] = bytes(dice.randrange(256) for _ in range(dice.randint(1, 16)))
    return bytes(changed)
