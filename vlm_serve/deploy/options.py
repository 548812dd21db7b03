"""Options of `vlm-serve deploy`, in addition to those of the server and the engine."""

from __future__ import annotations

from dataclasses import dataclass

from vlm_serve.options.declared import normalise_all, refuse, section

_replicas = section("replicas")


@dataclass(frozen=True)
class DeployConfig:
    """Options of a deployment, validated together on construction.

    Raises:
        ConfigError: names every invalid option, not only the first one.
    """

    replicas: int = _replicas(
        2, "number of engines, each with its own weights and cache", low=1, high=256
    )
    max_replicas: int | None = _replicas(
        None,
        "scale up to this many replicas while prompts wait, and down again",
        low=1,
        high=256,
        default_text="none: no scaling",
    )
    target_queued_tokens: int = _replicas(
        16_384, "target for scaling: prompt tokens of open requests per replica", low=1
    )
    silence_timeout: float = _replicas(
        10.0,
        "seconds without a heartbeat until a replica's requests move to another replica",
        low=2.0,
        metavar="SECONDS",
    )
    without_keys: bool = _replicas(False, "allow listening beyond loopback without API keys")

    def __post_init__(self) -> None:
        refuse(normalise_all(self))
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            problem = f"max_replicas must be at least replicas ({self.replicas})"
            refuse([f"{problem}, got {self.max_replicas}"])

    @property
    def most(self) -> int:
        """The largest number of replicas."""
        return self.max_replicas or self.replicas
