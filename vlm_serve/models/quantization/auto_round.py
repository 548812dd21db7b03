"""auto-round's configuration: the tensors are those of GPTQ or AWQ, and `extra_config` names the
modules that differ."""

from __future__ import annotations

from collections.abc import Callable

from vlm_serve.errors import CheckpointError
from vlm_serve.models.quantization.base import Format
from vlm_serve.models.quantization.fields import Fields
from vlm_serve.models.quantization.rules import Rule, expression, rule

_PLAIN_BITS = 16
"""From this width on a module is dense."""
_PACKINGS = ("auto_round:auto_gptq", "auto_round:auto_awq")

Reader = Callable[[Fields], Format]


def auto_round_rules(
    fields: Fields, gptq: Reader, awq: Reader
) -> tuple[tuple[Rule, ...], Format | None]:
    """Return rules in order of precedence, and the format of all other modules.

    Args:
        fields: of the configuration.
        gptq, awq: read a format from such fields.

    Raises:
        CheckpointError: as from `QuantScheme.of`.
    """
    packing = str(fields.raw.get("packing_format", _PACKINGS[0]))
    read = {"gptq": gptq, "awq": awq}.get(packing.rpartition("auto_")[2].partition(":")[0])
    if read is None:
        raise CheckpointError(
            f"packing_format {packing!r} in {fields.place} is not supported, only "
            f"{' and '.join(map(repr, _PACKINGS))}: export the model in one of these"
        )
    fields.expect("data_type", "int")
    rules = []
    for name, content in fields.section("extra_config").items():
        own = Fields(content, f"{name!r} of extra_config in {fields.place}")
        bits = own.raw.get("bits", fields.raw.get("bits"))
        dense = isinstance(bits, int) and bits >= _PLAIN_BITS
        format_ = None if dense else read(Fields({**fields.raw, **own.raw}, own.place))
        plain = rule([name], format_)
        # Names that are expressions match from anywhere in a module's name.
        rules.append(plain if plain.names else Rule(format_, expressions=(expression(name),)))
    return tuple(rules), read(fields)
