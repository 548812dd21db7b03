"""The bound for resident memory is what docs/limits.md says, and follows from the options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from vlm_serve.preprocess.media.decoders import default_slots
from vlm_serve.server.bounds import parts, total
from vlm_serve.server.config import ServerConfig

LIMITS = Path(__file__).resolve().parents[2] / "docs" / "limits.md"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CONTEXT = 32768


def sizes(**options: Any) -> dict[str, int]:
    return dict(parts(ServerConfig(**options), CONTEXT))


def told(pattern: str) -> list[int]:
    """The numbers in a sentence of the document's list."""
    text = LIMITS.read_text(encoding="utf-8").split("## The bound for resident memory")[1]
    found = re.search(pattern, " ".join(text.split()))
    assert found is not None, pattern
    return [int(each.replace(" ", "")) for each in found.groups()]


def test_the_total_is_the_sum_of_parts_that_are_all_there() -> None:
    found = sizes()
    assert len(found) == 8 and all(size > 0 for size in found.values())
    assert total(ServerConfig(), CONTEXT) == sum(found.values())


@pytest.mark.parametrize(
    ("option", "value", "part"),
    [
        ("max_request_memory", "2GiB", "bodies and prompts"),
        ("max_body_size", "200MiB", "the body or medium that is favoured"),
        ("max_connections", 2048, "connections"),
        ("preprocess_threads", 8, "prompts that are being made"),
    ],
)
def test_an_option_decides_its_part_and_no_other(option: str, value: Any, part: str) -> None:
    plain, changed = sizes(), sizes(**{option: value})
    assert {name for name in plain if plain[name] != changed[name]} == {part}
    assert changed[part] > plain[part]


def test_an_engine_in_its_own_process_has_prompts_too() -> None:
    here, apart = (total(ServerConfig(), CONTEXT, apart=apart) for apart in (False, True))
    assert apart - here == ServerConfig().max_request_bytes


def test_a_longer_context_makes_larger_prompts() -> None:
    short, long = (dict(parts(ServerConfig(), length)) for length in (4096, 8192))
    name = "prompts that are being made"
    assert long[name] == 2 * short[name]


def test_the_document_has_the_numbers_of_the_code() -> None:
    found, config = sizes(), ServerConfig()
    light, heavy = default_slots()
    (each_light, each_heavy) = told(
        r"([\d ]+) MiB for each light decoding process and ([\d ]+) MiB for each heavy one"
    )
    assert found["light decoders"] == light * each_light * MIB
    assert found["heavy decoders"] == heavy * each_heavy * MIB
    assert told(r"([\d ]+) MiB while a grammar is compiled") == [
        found["compiling a grammar"] // MIB
    ]
    assert told(r"(\d+) GiB: copies that the decoders have") == [
        found["the decoders' copies of media"] // GIB
    ]
    (each,) = told(r"`--max-connections` x (\d+) KiB")
    assert found["connections"] == config.max_connections * each * KIB
    (token,) = told(r"`--preprocess-threads` x `--max-model-len` x (\d+) KiB")
    threads = config.preprocess_threads * 3 // 2
    assert found["prompts that are being made"] == threads * CONTEXT * token * KIB
    factor, value = told(r"(\d+) x `--max-body-size`, and (\d+) bytes for each value")
    large = sizes(max_body_size="1GiB")["the body or medium that is favoured"]
    larger = sizes(max_body_size="2GiB")["the body or medium that is favoured"]
    assert larger - large == factor * GIB, "where the values have reached their bound"
    assert value == 256
