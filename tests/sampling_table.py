"""The table of sampling options in docs/http-api.md, made from `SamplingParams`."""

from __future__ import annotations

from typing import Any

from vlm_serve.sampling_params import SamplingOption, SamplingParams, sampling_options

_NAMED = ("chat", "completions", "generate")


def sampling_table(params: Any = SamplingParams) -> str:
    """Return the documentation's table of the options, in Markdown."""
    heads = ("option", "/v1/responses", "/v1/messages", "effect")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for each in sampling_options(params):
        ours = dict.fromkeys(name for api in _NAMED for name in each.names.get(api, ()))
        if not ours:
            continue
        cells = [_code(ours)]
        cells += [_code(each.names.get(api, ())) or "-" for api in ("responses", "messages")]
        cells.append(each.help + _bounds(each))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _code(names: Any) -> str:
    return " ".join(f"`{name}`" for name in names)


def _bounds(option: SamplingOption) -> str:
    parts = []
    if option.high is not None and option.high > 1 << 53:
        return " (64 bits)"
    if option.low is not None and option.kind in ("int", "float"):
        parts.append(f"{'more than' if option.above_low else 'at least'} {option.low:g}")
    if option.high is not None:
        parts.append(f"at most {option.high:g}")
    if option.size is not None:
        parts.append(f"at most {option.size[1]} entries")
    if option.length is not None:
        parts.append(f"at most {option.length} characters each")
    return f" ({', '.join(parts)})" if parts else ""
