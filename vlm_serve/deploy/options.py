"""Options of `vlm-serve deploy`, in addition to those of the server and the engine."""

from __future__ import annotations

from dataclasses import dataclass

from vlm_serve.options import normalise_all, option, refuse

_REPLICAS = "replicas"


@dataclass(frozen=True)
class DeployConfig:
    """Options of a deployment, validated together on construction.

    Raises:
        ConfigError: names every option with a bad value, not only the first one.
    """

    replicas: int = option(
        2,
        "number of engines, each with its own weights and cache",
        group=_REPLICAS,
        kind="int",
        low=1,
        high=256,
    )
    max_replicas: int | None = option(
        None,
        "scale up to this many replicas while prompts wait, and down again",
        group=_REPLICAS,
        kind="int",
        low=1,
        high=256,
        default_text="none: no scaling",
    )
    target_queued_tokens: int = option(
        16_384,
        "prompt tokens of open requests per replica that scaling aims at",
        group=_REPLICAS,
        kind="int",
        low=1,
    )
    silence_timeout: float = option(
        10.0,
        "seconds of silence after which a replica's requests move to another one",
        group=_REPLICAS,
        kind="float",
        low=2.0,
        metavar="SECONDS",
    )
    without_keys: bool = option(
        False,
        "allow listening beyond loopback without API keys",
        group=_REPLICAS,
        kind="bool",
    )

    def __post_init__(self) -> None:
        refuse(normalise_all(self))
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            problem = f"max_replicas must be at least replicas ({self.replicas})"
            refuse([f"{problem}, got {self.max_replicas}"])

    @property
    def most(self) -> int:
        """Largest number of replicas."""
        return self.max_replicas or self.replicas
