"""EngineConfig: validated as a whole, and one table for flags, files and environment variables."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.options.declared import (
    format_size,
    from_environment,
    from_mapping,
    options_of,
    parse_size,
)
from vlm_serve.options.flags import Parser, add_options
from vlm_serve.server.config import ServerConfig

CONTRACT_FIELDS = {
    "device", "dtype", "deterministic", "block_size", "enable_prefix_caching", "cache_memory",
    "kv_cache_dtype", "state_dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "prefix_cache_state_interval", "prefix_cache_state_budget",
    "prefix_cache_decode_state_interval", "allowed_local_media_path", "threads",
}  # fmt: skip


def test_every_field_of_the_contract_is_there() -> None:
    assert {field.name for field in dataclasses.fields(EngineConfig)} >= CONTRACT_FIELDS


def test_config_is_frozen() -> None:
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.device = "cpu"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1GiB", 1 << 30), ("1.5 GiB", 3 << 29), ("8485MiB", 8485 << 20), ("2KB", 2000),
        ("3mb", 3_000_000), ("1TB", 10**12), ("4096", 4096), ("7 B", 7),
        ("9007199254740993", 9007199254740993),
    ],
)  # fmt: skip
def test_sizes_are_read_exactly(text: str, count: int) -> None:
    assert parse_size(text) == count
    assert EngineConfig(cache_memory=text).cache_memory_bytes == count


PAIRS = ("a=x", "b=y")


@pytest.mark.parametrize(
    "words",
    [
        ["demo", "--lora-modules", "a=x,b=y"],
        ["demo", "--lora-modules", "a=x", "b=y"],
        ["--lora-modules", "a=x", "b=y", "demo"],
        ["--lora-modules=a=x", "b=y", "demo"],
        ["--lora-modules", "a=x", "demo", "--lora-modules", "b=y"],
        ["--lora-modules", "a=x", "b=y", "--max-loras", "2", "demo"],
        ["demo", "--lora-modules", '{"name": "a", "path": "x"}', '{"name": "b", "path": "y"}'],
        ["demo", "--lora-modules", '{"name": "a", "path": "x", "base_model_name": "m"}', "b=y"],
        ["demo", "--lora-modules", '[{"name": "a", "path": "x"}, "b=y"]'],
    ],
)
def test_adapters_may_be_named_in_the_forms_of_other_servers(words: list[str]) -> None:
    parser = Parser()
    parser.add_argument("model")
    add_options(parser, options_of(EngineConfig))
    options = parser.parse_args(words)
    assert tuple(options.lora_modules) == PAIRS and options.model == "demo"


def test_a_question_with_an_equals_sign_is_no_adapter() -> None:
    parser = Parser()
    parser.add_argument("question")
    add_options(parser, options_of(EngineConfig))
    options = parser.parse_args(["--lora-modules", "a=x", "Is 1=1?"])
    assert options.lora_modules == ["a=x"] and options.question == "Is 1=1?"


def test_objects_of_adapters_come_from_files_and_variables_too() -> None:
    made: Any = [{"name": "a", "path": "x"}, "b=y"]
    assert EngineConfig(lora_modules=made).lora_modules == PAIRS
    given = {"VLM_SERVE_LORA_MODULES": '{"name": "a", "path": "x"}'}
    assert from_environment(options_of(EngineConfig), given) == {
        "lora_modules": ({"name": "a", "path": "x"},)
    }


@pytest.mark.parametrize(
    "item", [{"name": "a"}, {"name": "a", "path": 5}, {"name": "a", "path": "x", "rank": 8}, {}]
)
def test_objects_that_are_no_adapters_are_refused(item: Any) -> None:
    with pytest.raises(ConfigError, match="^lora_modules must be objects with name and path"):
        EngineConfig(lora_modules=(item,))


@pytest.mark.parametrize("text", ["", "GiB", "1 parsec", "-1MiB", "1e9", "0x10", "1GiB 2", "٣MiB"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="^cache_memory must be"):
        EngineConfig(cache_memory=text)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1 << 20, "1 MiB"), (3 << 29, "1.5 GiB")]
)
def test_sizes_are_printed_in_binary_units(count: int, text: str) -> None:
    assert format_size(count) == text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "tpu"), ("device", "cuda:"), ("device", 3), ("dtype", "int4"),
        ("deterministic", 1), ("block_size", 24), ("block_size", 0),
        ("enable_prefix_caching", "on"),
        ("cache_memory", 0), ("cache_memory", True), ("cache_memory", 1.5),
        ("kv_cache_dtype", "fp4"), ("state_dtype", "float16"), ("max_model_len", 0),
        ("max_num_seqs", 0), ("max_num_seqs", True), ("max_num_seqs", 2.0), ("max_num_seqs", None),
        ("max_num_batched_tokens", -1), ("prefix_cache_state_interval", 0),
        ("prefix_cache_state_budget", -1), ("prefix_cache_decode_state_interval", -16),
        ("allowed_local_media_path", 7), ("threads", 0), ("limit_mm_per_prompt", "four"),
        ("limit_mm_per_prompt", "image=-1"), ("limit_mm_per_prompt", "image=1,image=2"),
        ("limit_mm_per_prompt", "sound=1"), ("limit_mm_per_prompt", 4),
        ("max_image_pixels", 1 << 30), ("media_fetch_timeout", float("nan")),
        ("allowed_media_domains", 5), ("allow_private_networks", "yes"),
    ],
)  # fmt: skip
def test_a_bad_value_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{field} must be") as raised:
        EngineConfig(**{field: value})  # type: ignore[arg-type]
    assert raised.value.param == field


def test_all_bad_values_are_named_in_one_error() -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig(device="tpu", dtype="int4", threads=0, block_size=17)
    for name in ("device", "dtype", "threads", "block_size"):
        assert f"{name} must be" in raised.value.message


def test_options_are_validated_together() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens .* 72, got 71"):
        EngineConfig(max_num_seqs=8, block_size=64, max_num_batched_tokens=71)
    EngineConfig(max_num_seqs=8, block_size=64, max_num_batched_tokens=72)
    with pytest.raises(ConfigError, match="multiple of the block size 64"):
        EngineConfig(block_size=64, prefix_cache_decode_state_interval=16)
    unresolved = EngineConfig(prefix_cache_decode_state_interval=16)
    with pytest.raises(ConfigError, match="multiple of the block size 64"):
        dataclasses.replace(unresolved, block_size=64)


def test_derived_values() -> None:
    assert EngineConfig().cache_memory_bytes is None
    assert EngineConfig(block_size=128).chunk_size == 64
    assert EngineConfig(block_size=16).chunk_size == 16
    assert EngineConfig(block_size=16).state_interval_blocks == 64
    assert EngineConfig(block_size=16, prefix_cache_state_interval=3).state_interval_blocks == 3


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("", {}),
        ("image=4", {"image": 4}),
        ("image=4, video = 0", {"image": 4, "video": 0}),
        ('{"image": 4, "video": 1}', {"image": 4, "video": 1}),
    ],
)
def test_limits_per_modality(text: str, limits: dict[str, int]) -> None:
    assert EngineConfig(limit_mm_per_prompt=text).max_media_per_prompt == limits


def test_a_config_survives_being_made_again_from_its_own_values() -> None:
    config = EngineConfig(cache_memory="2GiB", block_size=32)
    assert EngineConfig(**dataclasses.asdict(config)) == config


def test_environment_variables_have_the_options_names() -> None:
    found = from_environment(
        options_of(EngineConfig),
        {
            "VLM_SERVE_MAX_NUM_SEQS": "4",
            "VLM_SERVE_ENABLE_PREFIX_CACHING": "false",
            "VLM_SERVE_CACHE_MEMORY": "1MiB",
            "HOME": "/",
        },
    )
    config = EngineConfig(**found)
    assert config.max_num_seqs == 4
    assert config.cache_memory_bytes == 1 << 20
    assert config.enable_prefix_caching is False


@pytest.mark.parametrize(("name", "value"), [("THREADS", "two"), ("DETERMINISTIC", "maybe")])
def test_an_unreadable_environment_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name.lower()} must be"):
        from_environment(options_of(EngineConfig), {f"VLM_SERVE_{name}": value})


def test_a_config_file_takes_dashes_underscores_and_aliases() -> None:
    found = from_mapping(
        options_of(EngineConfig),
        {"block-size": 32, "max_num_seqs": 3, "kv-dtype": "int8", "state-interval": 2},
    )
    assert found == {
        "block_size": 32,
        "max_num_seqs": 3,
        "kv_cache_dtype": "int8",
        "prefix_cache_state_interval": 2,
    }


def test_an_unknown_key_of_a_config_file_is_named() -> None:
    with pytest.raises(ConfigError, match="blocksize"):
        from_mapping(options_of(EngineConfig), {"blocksize": 32})


def test_every_option_is_described() -> None:
    for item in options_of(EngineConfig):
        assert item.help
        assert item.group
        assert item.shown_default
        assert item.env == "VLM_SERVE_" + item.name.upper()
        assert item.normalise(item.default) == item.default


@pytest.mark.parametrize(
    ("option", "theirs", "ours"),
    [
        ("tool_call_parser", "qwen3_coder", "qwen3_xml"),
        ("tool_call_parser", "qwen3coder", "qwen3_xml"),
        ("reasoning_parser", "qwen-qwq", "qwen3"),
    ],
)
def test_parsers_have_the_names_of_other_servers(option: str, theirs: str, ours: str) -> None:
    given: dict[str, Any] = {option: theirs}
    assert getattr(ServerConfig(**given), option) == ours
    parser = Parser()
    add_options(parser, options_of(ServerConfig))
    flag = "--" + option.replace("_", "-")
    assert getattr(parser.parse_args([flag, theirs]), option) == ours
    with pytest.raises(ConfigError, match=f"{option} must be one of auto"):
        ServerConfig(**{**given, option: theirs + "x"})
