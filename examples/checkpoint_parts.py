"""Files of a checkpoint other than weights: tokenizer, chat template, processors.

Used by `make_checkpoint.py` (random weights) and by the recipe that trains the demo checkpoint.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
PLAIN_ADDED_TOKENS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
NUM_ADDED_TOKENS = len(SPECIAL_TOKENS) + len(PLAIN_ADDED_TOKENS)
MIN_VOCAB_SIZE = 256 + NUM_ADDED_TOKENS

# Pre-tokenization before BPE: contractions, words with one leading sign, single digits, runs of
# signs, line ends, spaces; in Qwen3.5 marks belong to words. AutoTokenizer installs the pattern of
# the model type, so another pattern in tokenizer.json would make the two disagree.
SPLIT_PATTERN, PLAIN_SPLIT_PATTERN = (
    "|".join(
        (
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
            rf"[^\r\n\p{{L}}\p{{N}}]?{letters}+",
            r"\p{N}",
            rf" ?[^\s{inside}\p{{N}}]+[\r\n]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    )
    for letters, inside in ((r"[\p{L}\p{M}]", r"\p{L}\p{M}"), (r"\p{L}", r"\p{L}"))
)

CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
BARE_CHAT_TEMPLATE = CHAT_TEMPLATE.replace("'<|vision_start|>' ~ ", "").replace(
    " ~ '<|vision_end|>'", " ~ '\\n'"
)
"""With a line break behind every medium, and no tokens around it."""


@dataclass(frozen=True)
class MediaShape:
    """Settings of patches and resizing. Sizes are in pixels, budgets in pixels per medium."""

    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2
    image_min_pixels: int = 64 * 64
    image_max_pixels: int = 1024 * 1024
    video_min_pixels: int = 2 * 64 * 64
    video_max_pixels: int = 64 * 256 * 256
    frames_per_second: float = 2.0
    min_frames: int = 4
    max_frames: int = 768


def build_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    split: str = SPLIT_PATTERN,
    more_tokens: Iterable[str] = (),
) -> Tokenizer:
    """Train a byte-level BPE tokenizer with the normaliser and the added tokens of Qwen3.5.

    The added tokens take the highest ids. Too little text yields fewer than `vocab_size` tokens.

    Args:
        texts: training text; without any, tokens are single bytes.
        vocab_size: number of ids, including added tokens; at least `MIN_VOCAB_SIZE`.
        split: pre-tokenization pattern.
        more_tokens: special tokens in addition to Qwen's.
    """
    more_tokens = tuple(more_tokens)
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at least {MIN_VOCAB_SIZE}, got {vocab_size}")
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=vocab_size - NUM_ADDED_TOKENS - len(more_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(_added_tokens((*SPECIAL_TOKENS, *more_tokens), special=True))
    tokenizer.add_tokens(_added_tokens(PLAIN_ADDED_TOKENS, special=False))
    return tokenizer


def _added_tokens(names: Iterable[str], *, special: bool) -> list[AddedToken]:
    return [AddedToken(name, special=special, normalized=False) for name in names]


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return int(found)


def media_token_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the vision token ids of config.json."""
    return {
        "image_token_id": token_id(tokenizer, "<|image_pad|>"),
        "video_token_id": token_id(tokenizer, "<|video_pad|>"),
        "vision_start_token_id": token_id(tokenizer, "<|vision_start|>"),
        "vision_end_token_id": token_id(tokenizer, "<|vision_end|>"),
    }


def write_tokenizer_files(
    path: Path,
    tokenizer: Tokenizer,
    *,
    max_length: int,
    kind: str = "Qwen3_5Tokenizer",
    processor: str | None = "Qwen3VLProcessor",
    named: Mapping[str, str] | None = None,
    bare: bool = False,
) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into `path`.

    Args:
        max_length: the model's context, in tokens.
        kind: transformers' class.
        processor: transformers' class; None if the model takes no media.
        named: further special tokens by their names in that class.
        bare: the processor, not the template, puts tokens around media.
    """
    tokenizer.save(str(path / "tokenizer.json"))
    template = BARE_CHAT_TEMPLATE if bare else CHAT_TEMPLATE
    for name, pad in (("context_image_token", "image"), ("video_token", "video")):
        template = template.replace(f"<|{pad}_pad|>", (named or {}).get(name, f"<|{pad}_pad|>"))
    (path / "chat_template.jinja").write_text(template, encoding="utf-8")
    config = {
        "tokenizer_class": kind,
        **({"processor_class": processor} if processor else {}),
        "add_prefix_space": False,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "model_max_length": max_length,
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
        **(named or {}),
        "added_tokens_decoder": {
            str(found): _added_token_entry(token.content, token.special)
            for found, token in sorted(tokenizer.get_added_tokens_decoder().items())
        },
    }
    write_json(path / "tokenizer_config.json", config)


def _added_token_entry(name: str, special: bool) -> dict[str, Any]:
    return {
        "content": name,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": special,
    }


def write_processor_files(path: Path, media: MediaShape) -> None:
    """Write preprocessor_config.json and video_preprocessor_config.json into `path`."""
    shared = {
        "processor_class": "Qwen3VLProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "patch_size": media.patch_size,
        "temporal_patch_size": media.temporal_patch_size,
        "merge_size": media.merge_size,
    }
    image = shared | {
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": media.image_min_pixels, "longest_edge": media.image_max_pixels},
    }
    video = shared | {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "size": {"shortest_edge": media.video_min_pixels, "longest_edge": media.video_max_pixels},
        "fps": media.frames_per_second,
        "min_frames": media.min_frames,
        "max_frames": media.max_frames,
        "do_sample_frames": True,
        # Explicit because transformers 5.22 changes the default.
        "cap_pixels_per_frame": True,
    }
    write_json(path / "preprocessor_config.json", image)
    write_json(path / "video_preprocessor_config.json", video)


def write_generation_config(
    path: Path, tokenizer: Tokenizer, defaults: Mapping[str, Any] | None = None
) -> None:
    """Write generation_config.json: end of turn and of text stop; greedy by default."""
    config = {
        "do_sample": False,
        "eos_token_id": [token_id(tokenizer, "<|im_end|>"), token_id(tokenizer, "<|endoftext|>")],
        "pad_token_id": token_id(tokenizer, "<|endoftext|>"),
    }
    write_json(path / "generation_config.json", config | dict(defaults or {}))


def write_json(path: Path, value: object) -> None:
    """Write `value` as readable JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def sample_text(num_sentences: int, seed: int = 0) -> Iterator[str]:
    """Return generated sentences for training a tokenizer."""
    draw = random.Random(seed)
    colours = ("red", "green", "blue", "yellow", "white", "black", "grey", "orange", "purple")
    things = ("circle", "square", "triangle", "house", "river", "picture", "video", "street", "cat")
    places = ("left", "right", "middle", "top", "bottom", "corner", "background", "foreground")
    asks = ("What is", "Where is", "Describe", "Show me", "Tell me about", "Count", "Compare")
    ends = (".", "?", "!", ", please.", ";\n", ":\n- ", " (see below).", " — thank you.")
    for _ in range(num_sentences):
        subject = f"the {draw.choice(colours)} {draw.choice(things)}"
        place = f"in the {draw.choice(places)} of the {draw.choice(things)}"
        number = draw.randrange(10 ** draw.randint(1, 4))
        shapes = (
            f"{draw.choice(asks)} {subject} {place}{draw.choice(ends)}",
            f"There are {number} of them: {subject} is {place}{draw.choice(ends)}",
            f"It's {number / 10:.1f} seconds long, and {subject} isn't {place}{draw.choice(ends)}",
            f'{{"name": "{draw.choice(things)}", "at": "{draw.choice(places)}", "n": {number}}}',
            f"Für {number} Übungen: naïve café, größer{draw.choice(ends)} 你好，图片在哪里？",
        )
        yield draw.choice(shapes)
