"""The tokenizer wrapper against transformers' AutoTokenizer."""

from __future__ import annotations

import codecs
import json
import shutil
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import oracle
import pytest
from checkpoint_spec import SMALL_SPECS
from hypothesis import given
from hypothesis import strategies as st
from make_checkpoint import make_checkpoint

from vlm_serve.errors import CheckpointError, ContextLengthError
from vlm_serve.preprocess.text.tokenizer import Tokenizer

TEXTS = [
    "",
    " ",
    "\n\n  \t x",
    "It's 1234 o'clock — WE'LL see…",
    "e\u0301 \u1100\u1161 \u212b ﬁ",  # NFC composes the first three, not the last
    "你好，图片在哪里？ \u0e17\u0e35\u0e48 \u0915\u093f",
    "🙂👩‍👩‍👧 \U0001f1e9\U0001f1ea",
    "a<|im_start|>b<|im_end|>\n<|im_end|><|endoftext|>",
    "<think>\nx\n</think>\n\n<tool_call>y</tool_call>",
    "<|vision_start|><|image_pad|><|image_pad|><|vision_end|> <|video_pad|> ",
    "<|im_start|<|im_start|>|>",
    "\x00\x07\ufffd\uf8ff\U000f0000",
    "<0.3 seconds>",
]


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_vl", "qwen3_next", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Families split words in their own ways, whatever tokenizer.json says."""
    spec = replace(SMALL_SPECS[request.param], vocab_size=1024)
    return make_checkpoint(tmp_path_factory.mktemp("tokenizer"), spec)


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Tokenizer:
    return Tokenizer(checkpoint)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_transformers(tokenizer: Tokenizer, checkpoint: Path, text: str) -> None:
    reference = oracle.tokenizer(checkpoint)
    ids = tokenizer.encode(text)
    assert ids == reference(text)["input_ids"]
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == reference.decode(
            ids, skip_special_tokens=skip
        )


@given(
    st.text(max_size=60)
    | st.lists(
        st.sampled_from(["<|im_end|>", "<|image", "_pad|>", " ", "\n", "a", "é", "<think>"])
    ).map("".join)
)
def test_ids_equal_transformers_on_random_text(
    tokenizer: Tokenizer, checkpoint: Path, text: str
) -> None:
    reference = oracle.tokenizer(checkpoint)
    ids = tokenizer.encode(text)
    assert ids == reference(text)["input_ids"]
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
def test_plain_text_never_gives_a_special_token(tokenizer: Tokenizer, text: str) -> None:
    text = "".join(f"{character}<|image_pad|>" for character in text) + "<|im_end|>"
    ids = tokenizer.encode_plain(text)
    assert not any(tokenizer.is_special(token_id) for token_id in ids)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)


def test_bytes_of_tokens_join_to_the_text(tokenizer: Tokenizer) -> None:
    for text in TEXTS:
        ids = tokenizer.encode(text)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        streamed = "".join(decoder.decode(tokenizer.token_bytes(i)) for i in ids)
        assert streamed == tokenizer.decode(ids, skip_special_tokens=False)


def test_broken_bytes_decode_alike(tokenizer: Tokenizer, checkpoint: Path) -> None:
    ids = tokenizer.encode_plain("🙂é你")
    pieces = [list(ids[:n]) for n in range(len(ids))] + [ids[::-1], ids[1:]]
    for piece in pieces:
        text = oracle.tokenizer(checkpoint).decode(piece)
        assert tokenizer.decode(piece) == text
        assert b"".join(map(tokenizer.token_bytes, piece)).decode("utf-8", "replace") == text


def test_every_id_has_the_bytes_that_decoding_gives(tokenizer: Tokenizer) -> None:
    for token_id in range(tokenizer.vocab_size):
        raw = tokenizer.token_bytes(token_id)
        assert raw
        assert raw.decode("utf-8", "replace") == tokenizer.decode(
            [token_id], skip_special_tokens=False
        )
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_ids_of_the_checkpoint(tokenizer: Tokenizer, checkpoint: Path) -> None:
    reference = oracle.tokenizer(checkpoint)
    assert tokenizer.vocab_size == len(reference)
    assert tokenizer.end_of_turn_ids == {reference.convert_tokens_to_ids("<|im_end|>")}
    generation = json.loads((checkpoint / "generation_config.json").read_text())
    assert tokenizer.eos_ids == set(generation["eos_token_id"])
    assert tokenizer.special_names["eos_token"] == "<|im_end|>"
    assert tokenizer.token_to_id("no such token") is None
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None


def test_split_of_the_model_type_wins_over_the_file(checkpoint: Path, tmp_path: Path) -> None:
    """As in transformers: a tokenizer.json saved with Qwen2's split still reads like Qwen3.5's."""
    shutil.copytree(checkpoint, tmp_path / "c")
    path = tmp_path / "c" / "tokenizer.json"
    data = json.loads(path.read_text())
    data["normalizer"] = None
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{L}+|\s+|[^\s\p{L}]"
    path.write_text(json.dumps(data))
    tokenizer = Tokenizer(tmp_path / "c")
    reference = oracle.tokenizer(tmp_path / "c")
    for text in TEXTS:
        assert tokenizer.encode(text) == reference(text)["input_ids"]
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    config["model_type"] = "other"
    (tmp_path / "c" / "config.json").write_text(json.dumps(config))
    assert Tokenizer(tmp_path / "c").encode("a-1 b") != tokenizer.encode("a-1 b")


def test_added_tokens_of_the_config_are_known(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "c")
    path = tmp_path / "c" / "tokenizer.json"
    data = json.loads(path.read_text())
    data["added_tokens"] = [t for t in data["added_tokens"] if "tool" not in t["content"]]
    assert len(data["added_tokens"]) == 9
    path.write_text(json.dumps(data))
    text = "a<tool_call>b</tool_response>"
    ids = Tokenizer(tmp_path / "c").encode(text)
    assert ids == oracle.tokenizer(tmp_path / "c")(text)["input_ids"]


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model": 3}'])
def test_unusable_files_are_named(checkpoint: Path, tmp_path: Path, content: str | None) -> None:
    shutil.copytree(checkpoint, tmp_path / "c")
    (tmp_path / "c" / "tokenizer.json").unlink()
    if content is not None:
        (tmp_path / "c" / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path / "c")


@pytest.mark.parametrize("ids", [10**9, 1 << 40, -1, [5, 10**9], "5", True, 5.0, [[5]], {}])
def test_ends_that_no_model_can_reach_are_refused(
    checkpoint: Path, tmp_path: Path, ids: object
) -> None:
    shutil.copytree(checkpoint, tmp_path / "c")
    (tmp_path / "c" / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(CheckpointError, match=r"eos_token_id .* is not a token of this checkpoint"):
        Tokenizer(tmp_path / "c")


def test_transformers_is_not_imported() -> None:
    code = (
        "import sys, vlm_serve.preprocess.text.tokenizer;"
        "sys.exit('transformers' in sys.modules or 'torchvision' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_text_far_beyond_the_context_is_refused_and_one_at_its_end_is_not(
    checkpoint: Path,
) -> None:
    text = "word " * 2000
    length = len(Tokenizer(checkpoint).encode(text))
    tokenizer = Tokenizer(checkpoint, max_tokens=length)
    assert len(tokenizer.encode(text)) == length
    assert len(tokenizer.encode("<|im_end|>" * length)) == length
    for long in (text * 3, "a" * 40 * length):
        with pytest.raises(ContextLengthError) as caught:
            tokenizer.encode(long)
        assert caught.value.code == "context_length_exceeded"


WORDS = """
import ctypes, random, string, sys
from pathlib import Path
from vlm_serve.preprocess.text.tokenizer import Tokenizer

def resident():
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

tokenizer, rng = Tokenizer(Path(sys.argv[1])), random.Random(0)

def encode(count):
    for _ in range(count):
        words = ("".join(rng.choices(string.ascii_lowercase, k=200)) for _ in range(1000))
        assert tokenizer.encode(" ".join(words))

encode(2)
before = resident()
encode(9)
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_words_of_strangers_are_not_kept(checkpoint: Path) -> None:
    """Ten thousand long ones would take 60 MiB for ever."""
    command = [sys.executable, "-c", WORDS, str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 16 << 20
