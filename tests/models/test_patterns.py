"""Patterns of files mean what they mean to `re`, and none of them stops a server."""

from __future__ import annotations

import fnmatch
import pickle
import random
import re
import threading
from contextlib import suppress

import pytest

from vlm_serve.errors import CheckpointError
from vlm_serve.models.patterns import MAX_NAME, Pattern, patterns_of_one_file
from vlm_serve.models.quantization.fields import rule, wildcard
from vlm_serve.models.quantization.scheme import QuantScheme

NAME = "model.language_model.layers.10.linear_attn.in_proj_qkv"
LONG = "a" * 2000


@pytest.mark.parametrize(
    "text",
    [
        r".*layers\.(0|1|10)\..*in_proj_\w+$",
        r"^(?!.*(visual|mlp)).*$",
        r"(?:.*?(?:vision|visual).*?(?:attn|mlp).*?proj.*?)|(?:\bmodel\.language_model\..*attn.*)",
        r"(?i)MODEL\.Language_Model\.LAYERS\.[0-9]{1,3}\.",
        r"(?i:MODEL).*(?-i:layers)",
        r"model\.(?=language)(\w+\.)+in_proj_[a-q]kv(?<=kv)",
        r"model.*(?<!z)$",
        r"(?x) model . *  # all of them",
        r"[^\d]+\d{2}\D+\Z",
        r"\Amodel\b\.l\B",
        "",
        "lm_head|",
        r"[(?{]|model\(?\.",
        r"(?P<part>model)\.(?:(?P=part)|language)",
        r"model\.language_model\.layers\.1\.",
        r"visual.*",
    ],
)
def test_patterns_of_real_files_match_as_in_python(text: str) -> None:
    for name in (
        NAME,
        NAME.replace("linear", "self"),
        "model.visual.blocks.3.attn.proj",
        "lm_head",
    ):
        assert Pattern(text, "ignore").match(name) is bool(re.match(text, name))


def _random(draw: random.Random, depth: int) -> str:
    """Return a random expression: branches of parts, some of them repeated."""
    parts = ["a", "b", ".", "X", r"\.", "_", "1", "[ab]", "[^a]", r"\d", r"\w", r"\W", r"[^\d_]"]
    places = ["^", "$", r"\b", r"\B", r"\Z", "(?<=a)", "(?<![ab].)"]
    groups = ["(", "(?:", "(?i:", "(?s:", "(?m:", "(?a:", "(?=", "(?!"]
    counts = ["*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{2,}", "{,2}?"]
    branches = []
    for _ in range(draw.choice((1, 1, 2))):
        branch = ""
        for _ in range(draw.randint(0, 4)):
            kind = draw.random()
            if kind < 0.3 and depth:
                branch += draw.choice(groups) + _random(draw, depth - 1) + ")"
            else:
                branch += draw.choice(places if kind < 0.4 else parts)
            branch += draw.choice(counts) if draw.random() < 0.3 else ""
        branches.append(branch)
    return "|".join(branches)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_random_patterns_match_as_in_python(seed: int) -> None:
    draw = random.Random(seed)
    compared = 0
    while compared < 2000:
        text = draw.choice(("", "", "(?i)", "(?m)")) + _random(draw, 3)
        try:
            known = re.compile(text)
        except re.error:
            continue
        pattern = Pattern(text, "ignore")
        for _ in range(5):
            name = "".join(draw.choices("aabbcABX._1\n", k=draw.randint(1, 9)))
            assert pattern.match(name) is bool(known.match(name)), (text, name)
            compared += 1


HOSTILE = [
    "([a-z0-9._]+)+{}",
    "^(.*?)*?{}",
    "(?:(.)|(.))*(?:(.)|(.))*{}",
    "(a?){{60}}a{{60}}{}",
    ".*.*.*.*.*.*.*.*{}",
    "(?=(?=(?=(a|aa)+)+)+)+{}",
    "(a|" * 60 + "b" + ")*" * 60 + "{}",
]
"""Expressions that `re` would match for years, with all other threads standing."""


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_patterns_end_and_let_other_threads_run(text: str) -> None:
    """No two characters are those at the end, so every way to the end is tried."""
    done, turns = threading.Event(), 0

    def match() -> None:
        for name in (NAME, LONG):
            pattern = Pattern(text.format("[^a-z0-9._]"), "x")
            pattern.budget.seconds = 0.3
            with suppress(CheckpointError):
                assert not pattern.match(name)
        done.set()

    threading.Thread(target=match, daemon=True).start()
    while not done.wait(0.001):
        turns += 1
        assert turns < 60_000, "it ends"


@pytest.mark.parametrize(
    ("opened", "closed"),
    [
        ("(?:", ")+"),
        ("(a", ")+?"),
        ("(?:", ")++"),
        ("(?:", "){1,}"),
        ("(?P<g%d>", "){1,2}"),
        ("(?>", ")+"),
        ("(?:(?=", "))+"),
        (r"(?:[)]", ")+"),
        (r"(?:[^])]", ")+"),
        (r"(?:[\]\))]", ")+"),
        (r"(?:\)", ")+"),
        ("(?:(?#)", ")+"),
        ("(?i:", ")+"),
        ("(?x:#)\n", ")+"),
    ],
)
def test_groups_repeated_within_each_other_are_refused(opened: str, closed: str) -> None:
    """`regex` writes such a group out twice: forty of them are a terabyte."""
    nested = "".join(opened.replace("%d", str(n)) for n in range(40)) + "a" + closed * 40
    with pytest.raises(CheckpointError, match="repeats too much"):
        Pattern(nested, "rank_pattern")


def test_groups_repeated_behind_each_other_are_taken() -> None:
    text = r"(?:\w+\.)+(?:a{2}|(?:b+c)+)" + r"(?:\.\w+)+" * 40
    assert Pattern(text, "ignore").match("x.y.bc" + ".z" * 40)


def test_patterns_of_a_file_are_made_and_matched_within_a_time() -> None:
    """However many there are, and however little time a use of one takes."""
    with patterns_of_one_file():
        first = Pattern("a", "rank_pattern")
        first.budget.seconds, first.budget.free = 0.01, 0.05
        with pytest.raises(CheckpointError, match="takes too long, or those before it"):
            for n in range(100_000):
                Pattern(f"layers.{n}.q_proj", "rank_pattern")
    first.budget.seconds, first.budget.free = 0.01, 0.05
    with pytest.raises(CheckpointError, match="takes too long, or those before it"):
        for _ in range(1_000_000):
            first.match("layers.0.q_proj")


def test_a_pattern_that_takes_too_long_is_shown() -> None:
    pattern = Pattern("^(.*?)*?[^a-z0-9._]", "adapter_config.json: rank_pattern")
    pattern.budget.seconds = 0.05
    words = re.escape("rank_pattern: '^(.*?)*?[^a-z0-9._]' takes too long")
    for name in (NAME, "a"):  # Nothing is left for another name, however short.
        with pytest.raises(CheckpointError, match=words):
            pattern.match(name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(", "is no pattern: no regular expression"),
        ("a)|(b", "is no pattern"),  # two halves of a group around it
        ("a\\", "is no pattern"),
        ("a{99999999999}", "repeats too much"),
        ("(.{5000}){5000}", "repeats too much"),
        ("((((.{20}){20}){20}){20}){20}", "repeats too much"),
        # The package `regex` takes these for approximate matches and patterns within themselves.
        ("(?:.*){e<=9}", "is no pattern"),
        ("(?:a|(?R))*", "is no pattern"),
        (r"\h+", "is no pattern"),
        ("[[:alpha:]]+", "is no pattern"),
        ("(?if)ss", "is no pattern"),
        ("(?iV1)[a--b]", "is no pattern"),
        ("a(*FAIL)", "is no pattern"),
        ("(?(DEFINE)(a))b", "is no pattern"),
        ("a" * 5000, "has 5000 characters, more than 4096"),
        ("(" * 1500 + ")" * 1500, "is nested too deeply"),
    ],
)
def test_patterns_that_are_refused_are_shown(text: str, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Pattern(text, "adapter_config.json: rank_pattern", r"(.*\.)?(", ")$")
    message = str(caught.value)
    assert message.startswith("adapter_config.json: rank_pattern: ")
    assert words in message
    assert len(message) < 300
    assert "\n" not in message


def test_the_patterns_of_a_file_share_a_budget() -> None:
    with patterns_of_one_file():
        first, *_, last = [Pattern(f"^(.*?)*?[^a{n}]$", "rank_pattern") for n in range(10)]
    first.budget.seconds = 0.1
    for pattern, name in ((first, "a" * 50), (last, "a")):
        with pytest.raises(CheckpointError, match="takes too long, or those before it"):
            pattern.match(name)
    assert not Pattern("^(.*?)*?[^a]$", "rank_pattern").match("a"), "another file's"


def test_the_patterns_of_a_file_share_what_they_repeat() -> None:
    with (
        patterns_of_one_file(),
        pytest.raises(CheckpointError, match="repeats too much, or those before it"),
    ):
        for n in range(999):
            Pattern(f"a{{900}}{n}", "rank_pattern")
    assert Pattern("a{900}", "rank_pattern").match("a" * 900)


def test_sound_patterns_spend_next_to_nothing() -> None:
    """Models of many experts have some hundred thousand modules."""
    pattern = Pattern(r".*layers\.\d+\.mlp\.experts\.\d+\.(up|down)_proj$", "ignore")
    before = pattern.budget.seconds
    for expert in range(20_000):
        assert pattern.match(f"model.layers.7.mlp.experts.{expert}.up_proj")
    assert pattern.budget.seconds > before / 2


def test_names_are_bounded_too() -> None:
    pattern = Pattern(".*a", "ignore")
    assert pattern.match("a" * MAX_NAME)
    with pytest.raises(CheckpointError, match=f"has {MAX_NAME + 1} characters"):
        pattern.match("a" * (MAX_NAME + 1))


def test_a_pattern_can_be_compared_and_sent_to_another_process() -> None:
    pattern = pickle.loads(pickle.dumps(Pattern("b+", "ignore", "a", "c")))
    assert pattern in {Pattern("b+", "ignore", "a", "c")}
    assert pattern != Pattern("b+", "ignore", "a")
    assert pattern.match("abbc")
    assert not pattern.match("ac")


@pytest.mark.parametrize(
    "text", ["*gate*", "model.*.layers.[!2-9]*", "a[*]b", "la?ers*", "[]]*", "[x", "a*" * 30 + "X"]
)
def test_wildcards_mean_what_they_mean_to_fnmatch(text: str) -> None:
    for name in ("layers.0.mlp.gate", "visual.layers.10", "layers.3.q", "a*b", "]x", "[x", LONG):
        assert wildcard(text).match(name) is fnmatch.fnmatchcase(name, text.removeprefix("model."))


@pytest.mark.parametrize(
    "config",
    [
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 128,
            "dynamic": {"-:^(.*?)*?[^a-z0-9._]": {}},
        },
        {"quant_method": "fp8", "modules_to_not_convert": ["(.*?)*?[^a-z0-9._]"]},
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "extra_config": {"(.*?)*?[^a-z0-9._]": {"bits": 8}},
        },
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "ignore": ["re:(.*?)*?[^a-z0-9._]"],
            "config_groups": {
                "group_0": {
                    "targets": ["re:(.*?)*?[^a-z0-9._]", "Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                }
            },
        },
    ],
    ids=lambda config: str(config["quant_method"]),
)
def test_every_reader_of_a_configuration_has_one_budget(config: dict[str, object]) -> None:
    scheme = QuantScheme.of({"quantization_config": config})
    assert scheme is not None
    (budget,) = {each.budget for own in scheme.rules for each in own.expressions}
    budget.seconds = 0.05
    with pytest.raises(CheckpointError, match="takes too long"):
        scheme.format_of(f"layers.0.{'a' * 1900}.weight")


def test_half_a_group_of_a_configuration_is_refused() -> None:
    with pytest.raises(CheckpointError, match="is no pattern"):
        rule(["a)|(?:b"], None)
