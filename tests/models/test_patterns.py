"""Patterns of files mean what they mean to `re`, and none of them stops a server."""

from __future__ import annotations

import fnmatch
import pickle
import random
import re

import pytest

from vlm_serve.errors import CheckpointError
from vlm_serve.models.patterns import MAX_NAME, MAX_STEPS, Budget, Pattern, share_budget
from vlm_serve.models.quantization.rules import rule, wildcard
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
            with pytest.raises(CheckpointError, match="is no pattern"):
                Pattern(text, "ignore")
            continue
        pattern = Pattern(text, "ignore")
        for _ in range(5):
            name = "".join(draw.choices("aabbcABX._1\n", k=draw.randint(1, 9)))
            assert pattern.match(name) is bool(known.match(name)), (text, name)
            compared += 1


@pytest.mark.parametrize(
    "text",
    [
        "([a-z0-9._]+)+X",
        "(a|aa)+X",
        "((a|a)*)*X",
        "(a?){500}a{500}X",
        "(a{1000}){1000}",
        "(((a{300}){300}){300}){300}",
        "(((a{0,300}){0,300}){0,300}){0,300}X",
        "((((a*)*)*)*)*X",
        ".*.*.*.*.*.*.*.*X",
        ".{0,4000000000}.{4000000000}",
        "(?=(?=(?=(a|aa)+)+)+)+X",
        "(?!(a|aa)+X)aX",
        "(a|" * 60 + "b" + ")*" * 60 + "X",
    ],
)
def test_patterns_without_end_to_re_take_few_steps(text: str) -> None:
    """`re` would try for years, with all other threads standing."""
    pattern = Pattern(text, "rank_pattern", r"(.*\.)?(", ")$")
    for name in (NAME, LONG):
        assert not pattern.match(name)
    assert MAX_STEPS - pattern.budget.left < MAX_STEPS / 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("(", "is no pattern: no regular expression"),
        ("a)|(b", "is no pattern"),  # two halves of a group around it
        ("a\\", "is no pattern"),
        ("(?i)a", "is no pattern"),  # as in PEFT, which writes something in front of it
        ("a{99999999999}", "is no pattern"),
        ("a" * 5000, "has 5000 characters, more than 4096"),
        ("(" * 1500 + ")" * 1500, "is nested too deeply"),
        (r"(a)\1", "has a back-reference"),
        ("(a)?(?(1)b|c)", "has a back-reference, a condition"),
        ("a*+a", "or a possessive part"),
        ("(?>a*)a", "or a possessive part"),
        (r"(?:(?i:[\x00-\U0010ffff]))" * 9, "takes too long"),
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
    budget = Budget(3000)
    patterns = [Pattern(f"(a|aa|{n})+X", "rank_pattern", budget=budget) for n in range(10)]
    with pytest.raises(CheckpointError, match=r"rank_pattern: '\(a\|aa\|.*takes too long"):
        for number in range(100):
            for each in patterns:
                each.match("a" * 50 + str(number))
    assert patterns[0].budget is budget
    share_budget(patterns)
    assert patterns[0].budget is patterns[9].budget is not budget
    assert not patterns[0].match("a" * 50)


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
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:([a-z.]+)+X": {}}},
        {"quant_method": "fp8", "modules_to_not_convert": ["([a-z0-9._]+)+X"]},
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "extra_config": {"([a-z0-9._]+)+X": {"bits": 8}},
        },
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*a" * 30 + "X"]},
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "ignore": ["re:([a-z0-9._]+)+X"],
            "config_groups": {
                "group_0": {
                    "targets": ["re:([a-z._]+|[a-z0-9._]+)*X", "Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                }
            },
        },
    ],
    ids=lambda config: str(config["quant_method"]),
)
def test_every_reader_of_a_configuration_matches_in_few_steps(config: dict[str, object]) -> None:
    scheme = QuantScheme.of({"quantization_config": config})
    assert scheme is not None
    for name in (f"{NAME}.weight", f"layers.0.{'a' * 1900}.weight"):
        assert scheme.format_of(name) is not None
    budgets = {id(p.budget): p.budget for own in scheme.rules for p in own.expressions}
    assert len(budgets) == 1
    assert all(MAX_STEPS - each.left < MAX_STEPS / 10 for each in budgets.values())


def test_half_a_group_of_a_configuration_is_refused() -> None:
    with pytest.raises(CheckpointError, match="is no pattern"):
        rule(["a)|(?:b"], None)
