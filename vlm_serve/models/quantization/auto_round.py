"""auto-round's configuration: the tensors are those of GPTQ or AWQ, and `extra_config` names the
modules that differ."""

from __future__ import annotations

from collections.abc import Callable

from vlm_serve.errors import CheckpointError
from vlm_serve.models.quantization.activations import of_auto_round
from vlm_serve.models.quantization.base import Format
from vlm_serve.models.quantization.fields import Fields
from vlm_serve.models.quantization.rules import Rule, expression, rule

_PLAIN_BITS = 16
"""From this width on a module is dense."""
_PACKINGS = ("auto_round:auto_gptq", "auto_round:auto_awq")

Reader = Callable[[Fields], Format]


def auto_round_rules(
    fields: Fields, gptq: Reader, awq: Reader
) -> tuple[tuple[Rule, ...], Format | None, list[str]]:
    """Return rules in order of precedence, the format of all other modules, and the wanted
    activations.

    Args:
        fields: of the configuration.
        gptq, awq: read a format from such fields.

    Raises:
        CheckpointError: as from `QuantScheme.of`.
    """
    # Files of before 2025 have the packing in `backend`, which later names a kernel.
    backend = str(fields.get("backend") or "auto").replace("autoround", "auto_round")
    packing = str(fields.get("packing_format") or (_PACKINGS[0] if ":" not in backend else backend))
    tensors = packing.removeprefix("auto_round:").removeprefix("auto_").partition(":")[0]
    read = {"gptq": gptq, "awq": awq}.get(tensors)
    if read is None:
        raise CheckpointError(
            f"packing_format {packing!r} in {fields.place} is not supported, only "
            f"{' and '.join(map(repr, _PACKINGS))}: export the model in one of these"
        )
    rules, wanted = [], of_auto_round(fields)
    for name, content in fields.section("extra_config").items():
        own = fields.changed(content, f"{name!r} of extra_config in {fields.place}")
        format_ = None if _is_dense(own) else read(own)
        wanted += of_auto_round(own)
        own.finish("auto-round")
        plain = rule([name], format_)
        # Names that are expressions match from anywhere in a module's name.
        rules.append(plain if plain.names else Rule(format_, expressions=(expression(name),)))
    default = read(fields)
    fields.finish("auto-round")
    return tuple(rules), default, wanted


def _is_dense(fields: Fields) -> bool:
    """Return True if a module has no codes; their fields then mean nothing."""
    bits = fields.get("bits")
    dense = isinstance(bits, int) and bits >= _PLAIN_BITS
    if dense:
        for name in ("data_type", "group_size", "sym", "super_bits", "super_group_size"):
            fields.get(name)
    return dense
