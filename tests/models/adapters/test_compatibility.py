"""Tokenizers and templates beside an adapter: the same ids in other words, and other ids."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import published_vocabulary
import pytest

import vlm_serve
from vlm_serve.errors import CheckpointError
from vlm_serve.models.adapters.compatibility import check_files
from vlm_serve.preprocess.text.tokenizer import Tokenizer

DEMO = Path(vlm_serve.__file__).parent / "demo/dense"
TEXTS = (
    "Hello, world <think> ü 北京 12345\n\n x",
    "<|im_start|>user\nhi<|im_end|>",
    "e\u0301 don't",
)
Json = dict[str, Any]


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def read(path: Path) -> Json:
    found: Json = json.loads(path.read_text(encoding="utf-8"))
    return found


def saved_again(checkpoint: Path, folder: Path, **names: str) -> Path:
    """Save a checkpoint's tokenizer as trainers do beside an adapter."""
    oracle.tokenizer(checkpoint, **names).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("names", [{}, {"pad_token": "<|video_pad|>", "padding_side": "left"}])
def test_what_transformers_saves_again_is_the_same(tmp_path: Path, names: dict[str, str]) -> None:
    folder = saved_again(DEMO, tmp_path, **names)
    assert read(folder / "tokenizer.json") != read(DEMO / "tokenizer.json")
    check_files(DEMO, folder)
    check_files(folder, DEMO)
    ours, theirs = oracle.tokenizer(folder), Tokenizer(DEMO)
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]


@pytest.mark.parametrize("name", ["qwen2", "qwen3.5", "minicpm"])
def test_published_vocabularies_are_the_same_after_transformers(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The class Qwen2Tokenizer writes a pattern of its own, which is told but not refused."""
    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    published_vocabulary.write_vocabulary(checkpoint, name)
    # Without config.json the class that tokenizer_config.json names is taken.
    folder = saved_again(checkpoint, tmp_path / "adapter")
    kinds = {"qwen2": "qwen3", "qwen3.5": "qwen3_5", "minicpm": "minicpmv4_6"}
    write(checkpoint / "config.json", {"model_type": kinds[name]})
    check_files(checkpoint, folder)
    assert ("Qwen2Tokenizer" in caplog.text) is (name == "qwen3.5")


def _model(**fields: Any) -> Callable[[Json], None]:
    return lambda raw: raw["model"].update(fields)


def _set(**fields: Any) -> Callable[[Json], None]:
    return lambda raw: raw.update(fields)


def _merges_as_texts(raw: Json) -> None:
    raw["model"]["merges"] = [" ".join(pair) for pair in raw["model"]["merges"]]


def _sequences_of_one(raw: Json) -> None:
    inner = raw["pre_tokenizer"]
    raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [inner]}
    raw["normalizer"] = {"type": "Sequence", "normalizers": [raw["normalizer"]]}


def _other_offsets(raw: Json) -> None:
    raw["pre_tokenizer"]["pretokenizers"][-1]["trim_offsets"] = True


def _other_order(raw: Json) -> None:
    raw["added_tokens"].reverse()
    raw["model"]["vocab"] = dict(reversed(raw["model"]["vocab"].items()))


def _special(raw: Json) -> None:
    for each in raw["added_tokens"]:
        each["special"] = True


def _vocabulary_with_added_tokens(raw: Json) -> None:
    raw["model"]["vocab"] |= {each["content"]: each["id"] for each in raw["added_tokens"]}


@pytest.mark.parametrize(
    "change",
    [
        _model(continuing_subword_prefix="", end_of_word_suffix="", unk_token=None, dropout=0.0),
        lambda raw: [raw["model"].pop(name, None) for name in ("ignore_merges", "byte_fallback")],
        _model(fuse_unk=True),
        _merges_as_texts,
        _sequences_of_one,
        _other_offsets,
        _other_order,
        _special,
        _vocabulary_with_added_tokens,
        _set(truncation={"max_length": 9, "strategy": "LongestFirst", "stride": 0}, version="2.0"),
        _set(padding={"strategy": "BatchLongest", "pad_id": 3}, decoder=None),
        _set(post_processor={"type": "ByteLevel", "trim_offsets": True}),
    ],
)
def test_words_that_decide_no_ids_may_differ(
    tmp_path: Path, change: Callable[[Json], object]
) -> None:
    raw = read(DEMO / "tokenizer.json")
    change(raw)
    write(tmp_path / "tokenizer.json", raw)
    check_files(DEMO, tmp_path)


def _two_merges_exchanged(raw: Json) -> None:
    merges = raw["model"]["merges"]
    merges[4], merges[5] = merges[5], merges[4]


def _token_added(raw: Json) -> None:
    raw["added_tokens"].append(raw["added_tokens"][0] | {"id": 800, "content": "<more>"})


def _first_added(**fields: Any) -> Callable[[Json], None]:
    return lambda raw: raw["added_tokens"][0].update(fields)


def _ids_exchanged(raw: Json) -> None:
    vocabulary = raw["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def _splits_by(pattern: str) -> Callable[[Json], None]:
    def change(raw: Json) -> None:
        raw["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}

    return change


def _prefix_space(raw: Json) -> None:
    raw["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_token_added, "the added token '<more>' (id 800)"),
        (lambda raw: raw["added_tokens"].pop(0), "no added token '<|endoftext|>'"),
        (_first_added(id=900), "with id 900, not 743"),
        (_first_added(lstrip=True), "'<|endoftext|>' with other single_word, lstrip"),
        (_ids_exchanged, "token 'a' with id"),
        (lambda raw: raw["model"]["vocab"].update({"zzz": 742_000}), "token 'zzz' with id 742000"),
        (_two_merges_exchanged, "other merges, from number 4 on"),
        (lambda raw: raw["model"]["merges"].pop(), "other merges, from number"),
        (_model(ignore_merges=True), "'ignore_merges' True, not None"),
        (_model(dropout=0.5), "'dropout' 0.5"),
        (_set(normalizer=None), "another normalizer"),
        (_set(normalizer={"type": "NFKC"}), "another normalizer"),
        (_splits_by(r"\w+|\s+"), "another pre-tokenizer"),
        (_prefix_space, "another pre-tokenizer"),
        (_set(pre_tokenizer=None), "another pre-tokenizer"),
    ],
)
def test_other_ids_are_refused_with_what_differs(
    tmp_path: Path, change: Callable[[Json], object], words: str
) -> None:
    raw = read(DEMO / "tokenizer.json")
    change(raw)
    write(tmp_path / "tokenizer.json", raw)
    with pytest.raises(CheckpointError) as caught:
        check_files(DEMO, tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tokens_of_other_files_count(tmp_path: Path) -> None:
    """Published files name some tokens in tokenizer_config.json alone."""
    raw, config = read(DEMO / "tokenizer.json"), read(DEMO / "tokenizer_config.json")
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    last = raw["added_tokens"].pop()
    write(model / "tokenizer.json", raw)
    write(model / "tokenizer_config.json", config)
    write(adapter / "tokenizer.json", raw)
    check_files(model, adapter)
    write(adapter / "tokenizer.json", raw | {"added_tokens": [*raw["added_tokens"], last]})
    check_files(model, adapter)
    write(adapter / "added_tokens.json", {"<more>": 800})
    with pytest.raises(CheckpointError, match=r"the added token '<more>' \(id 800\)"):
        check_files(model, adapter)
    (adapter / "added_tokens.json").unlink()
    more = {"800": last | {"content": "<more>"}}
    write(adapter / "tokenizer_config.json", {"added_tokens_decoder": more})
    with pytest.raises(CheckpointError, match=r"the added token '<more>' \(id 800\)"):
        check_files(model, adapter)


@pytest.mark.parametrize("form", ["text", "object"])
def test_a_new_token_to_fill_rows_is_passed_over(tmp_path: Path, form: str) -> None:
    """As TRL and unsloth add one. A token that is not named as that is another vocabulary."""
    raw, config = read(DEMO / "tokenizer.json"), read(DEMO / "tokenizer_config.json")
    new = raw["added_tokens"][-1] | {"id": 800, "content": "[PAD]", "special": True}
    write(tmp_path / "tokenizer.json", raw | {"added_tokens": [*raw["added_tokens"], new]})
    named = "[PAD]" if form == "text" else {"content": "[PAD]", "__type": "AddedToken"}
    write(tmp_path / "tokenizer_config.json", config | {"pad_token": named})
    check_files(DEMO, tmp_path)
    for other in ("<other>", None):
        write(tmp_path / "tokenizer_config.json", config | {"pad_token": other})
        with pytest.raises(CheckpointError, match=r"the added token '\[PAD\]' \(id 800\)"):
            check_files(DEMO, tmp_path)


ODD_FIELDS: list[Json] = [{"added_tokens": [3]}, {"normalizer": {}}, {"pre_tokenizer": [1]}]


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"model": 3}', '{"model": {"vocab": 3}}', "[" * 100_000]
    + [json.dumps({"model": {"vocab": {}, "merges": []}, **fields}) for fields in ODD_FIELDS],
)
def test_damaged_tokenizers_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        check_files(DEMO, tmp_path)


def _template_in(folder: Path, place: str, text: str) -> None:
    """Leave a folder's template in one place alone."""
    folder.mkdir(exist_ok=True)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    if place == "chat_template.jinja":
        (folder / place).write_text(text)
    elif place == "list":
        named = [{"name": "rag", "template": "x"}, {"name": "default", "template": text}]
        write(folder / "tokenizer_config.json", {"chat_template": named})
    else:
        write(folder / place, {"chat_template": text})


PLACES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json", "list")


@pytest.mark.parametrize("models", PLACES)
@pytest.mark.parametrize("adapters", PLACES)
def test_a_template_may_stand_in_any_file(tmp_path: Path, models: str, adapters: str) -> None:
    text = (DEMO / "chat_template.jinja").read_text()
    _template_in(tmp_path / "model", models, text)
    _template_in(tmp_path / "adapter", adapters, text + "\n")
    check_files(tmp_path / "model", tmp_path / "adapter")
    _template_in(tmp_path / "adapter", adapters, "{{ messages }}" + text)
    shown = "tokenizer_config.json" if adapters == "list" else adapters
    with pytest.raises(CheckpointError, match=f"a chat template in {shown} other than the model's"):
        check_files(tmp_path / "model", tmp_path / "adapter")


def test_a_template_of_options_is_the_models(tmp_path: Path) -> None:
    shutil.copytree(DEMO, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    _template_in(tmp_path / "adapter", "tokenizer_config.json", "{{ messages }}")
    (tmp_path / "other").write_text("{{ messages }}")
    with pytest.raises(CheckpointError, match="--chat-template"):
        check_files(tmp_path / "model", tmp_path / "adapter")
    check_files(tmp_path / "model", tmp_path / "adapter", template=str(tmp_path / "other"))
    write(tmp_path / "adapter/tokenizer_config.json", {"chat_template": [3]})
    with pytest.raises(CheckpointError, match="chat_template in tokenizer_config.json is no list"):
        check_files(tmp_path / "model", tmp_path / "adapter")
