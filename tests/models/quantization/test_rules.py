"""Which modules a line of quantization_config means, and how its fields are read."""

from __future__ import annotations

import re
from typing import Any

import pytest

from vlm_serve.errors import CheckpointError
from vlm_serve.models.quantization.fields import Fields, Rule, expression, plain_name, rule

GATE = "model.language_model.layers.0.mlp.gate"


@pytest.mark.parametrize(
    ("entry", "module", "fits"),
    [
        ("mlp.gate", GATE, True),
        ("mlp.gate", GATE + "_proj", False),  # whole words only
        ("gate", GATE, True),
        ("ate", GATE, False),
        ("layers.0", GATE, True),
        ("layers.0", GATE.replace(".0.", ".10."), False),
        ("layers.0.gate", GATE, False),  # words that do not follow each other
        ("visual", "model.visual.blocks.3.attn.qkv", True),
        ("lm_head", "lm_head", True),
        ("lm_head", "model.language_model.lm_head_norm", False),
        # What stands before a name depends on who wrote the file.
        ("model.layers.0.mlp.gate", GATE, True),
        ("language_model.model.layers.0.mlp.gate", GATE, True),
        ("model.language_model.layers.0.mlp.gate", "model.layers.0.mlp.gate", True),
    ],
)
def test_names_are_consecutive_words(entry: str, module: str, fits: bool) -> None:
    assert rule([entry], None).fits(module) is fits


@pytest.mark.parametrize(
    ("entry", "module", "fits"),
    [
        (r"model\.language_model\.layers\.\d+\.mlp\.gate", GATE, True),
        (r"model\.language_model\.layers\.\d+\.mlp\.gate", GATE + "_proj", False),
        (r"model\.language_model\.layers\.\d+\.mlp\.gate", GATE + ".weight", True),
        (r".*shared_expert.*", "model.layers.1.mlp.shared_expert.up_proj", True),
        (r".*shared_expert.*", GATE, False),
        (r"layers\.\d+", GATE, False),  # from the beginning of the name as it is
        (r"a$|model\.(visual|language_model\.layers\.0)", GATE, True),
    ],
)
def test_what_can_be_no_name_is_an_expression(entry: str, module: str, fits: bool) -> None:
    assert rule([entry], None).fits(module) is fits


def test_a_rule_without_entries_fits_nothing() -> None:
    assert not rule([], None).fits(GATE)
    assert not Rule(None).fits("")


def test_a_broken_expression_is_refused_with_its_text() -> None:
    with pytest.raises(
        CheckpointError, match=re.escape("quantization_config: '(layers' is no pattern")
    ):
        expression("(layers")
    with pytest.raises(CheckpointError, match="no regular expression"):
        rule(["mlp", "*gate*"], None)


def test_prefixes_are_left_out_only_at_the_beginning() -> None:
    assert plain_name("model.language_model.model.layers.1") == "layers.1"
    assert plain_name("visual.model.layers") == "visual.model.layers"
    assert plain_name("models.layers") == "models.layers"


def test_fields_that_are_there_and_right() -> None:
    fields = Fields({"bits": 4, "sym": False, "method": "gptq", "skip": ["a"], "dynamic": {"x": 1}})
    assert fields.number("bits", 4, 8) == 4
    assert fields.switch("sym", default=True) is False
    assert fields.switch("desc_act", default=True) is True
    fields.expect("method", "gptq", "awq")
    fields.expect("absent", "gptq")
    assert (fields.names("skip"), fields.names("absent")) == (["a"], [])
    assert (fields.section("dynamic"), fields.section("absent")) == ({"x": 1}, {})


@pytest.mark.parametrize("bits", [3, "4", 4.0, True, None])
def test_a_number_is_one_of_those_known(bits: Any) -> None:
    with pytest.raises(CheckpointError, match="bits .* is not supported, only 1 or 4 or 8"):
        Fields({"bits": bits}).number("bits", 1, 4, 8)


def test_what_is_wrong_is_named_with_its_place() -> None:
    fields = Fields(
        {"sym": 1, "skip": "mlp", "names": [1], "dynamic": [], "method": "x"}, "group_0"
    )
    with pytest.raises(CheckpointError, match="sym in group_0 must be true or false, not 1"):
        fields.switch("sym", default=True)
    with pytest.raises(CheckpointError, match="skip in group_0 must be a list of names, not 'mlp'"):
        fields.names("skip")
    with pytest.raises(CheckpointError, match="names in group_0 must be a list of names"):
        fields.names("names")
    with pytest.raises(CheckpointError, match="method 'x' in group_0 is not supported, only 'y'"):
        fields.expect("method", "y")
    with pytest.raises(CheckpointError, match="sym of group_0 in config.json must be an object"):
        fields.section("sym")
    with pytest.raises(CheckpointError, match="quantization_config in config.json must be an obj"):
        Fields(["gptq"])
