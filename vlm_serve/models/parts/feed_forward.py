"""Feed-forward parts: an MLP, and routed experts with or without a shared one, each with gates or
without.

Numerics follow transformers' Qwen3_5MLP and Qwen3_5MoeSparseMoeBlock; without gates those of
NemotronHMLP and NemotronHMoE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from vlm_serve.kernels.elementwise import times_sigmoid
from vlm_serve.kernels.linear import Linear, Part, Shard
from vlm_serve.kernels.linear.stored_codes import Stored
from vlm_serve.kernels.moe import route, routed_experts
from vlm_serve.kernels.moe.reference import Addends, Sigmoids, has_gates
from vlm_serve.kernels.norms import Normed
from vlm_serve.kernels.ranks import Ranks
from vlm_serve.models.parts.base import (
    FeedForward,
    LoadedFeedForward,
    OutputProjection,
    Routing,
    Step,
    added,
    shard_of_inputs,
)
from vlm_serve.models.program import Program, UnsupportedError
from vlm_serve.models.weights import Weights

PARTS = ("gate_proj", "up_proj", "down_proj")
UNGATED = ("up_proj", "down_proj")
Parts = tuple[str, str, str] | tuple[str, str]
"""Names of gate, up and down; of up and down without a gate."""


def stacked_experts(device: torch.device) -> bool:
    """Return True if kernels for a device take weights in one piece: those of all experts, and
    gate and up."""
    return device.type != "cpu"


@dataclass(frozen=True, slots=True)
class Mlp(FeedForward):
    """`down(silu(gate(x)) * up(x))`, or without a gate `down(max(up(x), 0) ** 2)`. `name` is the
    prefix of its tensors' names within a layer, `parts` are those within it; gate and up of one
    name are one tensor, the gate's rows first."""

    size: int
    name: str = "mlp"
    parts: Parts = PARTS

    def columns_to_split(self) -> Mapping[str, int]:
        return {"columns of the feed-forward": self.size}

    def load(self, source: Weights, layer: str, hidden: int) -> LoadedMlp | LoadedUngatedMlp:
        name, share = f"{layer}.{self.name}", source.ranks.share(self.size)
        *wide, last = self.parts
        joined = len(wide) - len(set(wide))
        parts = [
            Part(
                f"{name}.{part}.weight",
                ((1 + joined) * self.size, hidden),
                (range(first + share.start, first + share.stop),),
                least_bits=4,
            )
            for part, first in zip(wide, (0, joined * self.size), strict=False)
        ]
        joint = len(parts) == 1 or stacked_experts(source.device)
        loaded = [source.linear(*parts)] if joint else list(map(source.linear, parts))
        down = OutputProjection.load(
            source, Part(f"{name}.{last}.weight", (hidden, self.size), least_bits=4)
        )
        if len(parts) == 1:
            return LoadedUngatedMlp(loaded[0], down)
        return LoadedMlp(loaded[0], None if joint else loaded[1], down)


@dataclass(frozen=True, slots=True)
class LoadedMlp(LoadedFeedForward):
    """Weights. Without `up`, `gate` has its rows too, below its own."""

    gate: Linear
    up: Linear | None
    down: OutputProjection

    def apply(self, x: Normed, residual: torch.Tensor, step: Step) -> tuple[torch.Tensor, None]:
        return self.down(self.hidden(x, step), residual, step), None

    def hidden(self, x: Normed, step: Step) -> torch.Tensor:
        """Compute `silu(gate(x)) * up(x)`."""
        deterministic, changes = step.deterministic, step.changes
        if self.up is None:
            return self.gate.of_norm(x, gated=True, deterministic=deterministic, changes=changes)
        return self.gate.gated(self.up, x.rows, deterministic=deterministic, changes=changes)

    def lower(self, program: Program) -> None:
        if self.up is None:
            raise UnsupportedError("gate and up in one weight")
        self.down.lower(program, program.gated(self.gate, self.up))


@dataclass(frozen=True, slots=True)
class LoadedUngatedMlp(LoadedFeedForward):
    """Weights without a gate."""

    up: Linear
    down: OutputProjection

    def apply(self, x: Normed, residual: torch.Tensor, step: Step) -> tuple[torch.Tensor, None]:
        deterministic, changes = step.deterministic, step.changes
        hidden = self.up(x.rows, activation="relu2", deterministic=deterministic, changes=changes)
        return self.down(hidden, residual, step), None

    def lower(self, program: Program) -> None:
        program.check_whole(intermediate_size=self.up.columns)
        hidden = program.view("hidden", self.up.columns)
        program.product(self.up, program.normed, hidden, "STORE_RELU2")
        self.down.lower(program, hidden)


@dataclass(frozen=True, slots=True)
class Experts(FeedForward):
    """Experts of `size`, and a shared one of `shared` with a gate of its own, 0 for none.
    `transposed`: checkpoints store the routed experts' columns as rows. `parts` are the names of an
    expert's weights, where checkpoints hold them apart; two without gates, see `Mlp`. `router` is
    the name of the router, `bias` that of the biases of its choice."""

    routed: Routing
    size: int
    shared: int
    transposed: bool = False
    name: str = "mlp"
    parts: Parts = PARTS
    router: str = "gate"
    bias: str = "expert_bias"

    @property
    def routing(self) -> Routing:
        return self.routed

    def columns_to_split(self) -> Mapping[str, int]:
        return {"columns of an expert": self.size, "columns of the shared expert": self.shared}

    def load(self, source: Weights, layer: str, hidden: int) -> LoadedExperts:
        name, count = f"{layer}.{self.name}", self.routing.num_experts
        gate_up, down = self._parts(source, f"{name}.experts", hidden)
        router = [Part(f"{name}.{self.router}.weight", (count, hidden))]
        shared = None
        if self.shared:
            router.append(Part(f"{name}.shared_expert_gate.weight", (1, hidden)))
            loaded = Mlp(self.shared, "shared_expert").load(source, name, hidden)
            assert isinstance(loaded, LoadedMlp)
            shared = loaded
        sigmoids = None
        if self.routing.sigmoids is not None:
            biased, *numbers = self.routing.sigmoids
            bias = f"{name}.{self.bias}"
            of_choice = source.tensor(bias, (count,), dtype=torch.float32) if biased else None
            sigmoids = Sigmoids(of_choice, *numbers)
        stacked, shard = stacked_experts(source.device), shard_of_inputs(source)
        sites = (0, 0)
        if stacked:
            sites = (
                source.stacked_site(gate_up, count),
                source.stacked_site(down, count, shard),
            )
        return LoadedExperts(
            routing=self.routing,
            router=source.linear(*router),
            gate_up=source.stacked(gate_up, count) if stacked else _apart(source, gate_up, None),
            down=source.stacked(down, count, shard) if stacked else _apart(source, down, shard),
            shared=shared,
            ranks=source.ranks,
            sites=sites,
            sigmoids=sigmoids,
        )

    def _parts(self, source: Weights, name: str, hidden: int) -> tuple[list[Part], list[Part]]:
        """Return gate and up of every expert (the rank's share), and down of every expert;
        checkpoints hold them in one tensor, or expert by expert."""
        size, count, share = self.size, self.routing.num_experts, source.ranks.share(self.size)
        *wide, last = self.parts
        stacked = "gate_up_proj" if len(wide) == 2 else "up_proj"
        if f"{name}.{stacked}" in source:
            both = self._stored(source, f"{name}.{stacked}", (count, len(wide) * size, hidden))
            down = self._stored(source, f"{name}.down_proj", (count, hidden, size))
            firsts = range(0, len(wide) * size, size)
            halves = [range(first + share.start, first + share.stop) for first in firsts]
            return (
                [
                    replace(both, rows=(half,), index=expert)
                    for expert in range(count)
                    for half in halves
                ],
                [replace(down, index=expert) for expert in range(count)],
            )
        return (
            [
                Part(f"{name}.{expert}.{part}.weight", (size, hidden), (share,), least_bits=4)
                for expert in range(count)
                for part in wide
            ],
            [
                Part(f"{name}.{expert}.{last}.weight", (hidden, size), least_bits=4)
                for expert in range(count)
            ],
        )

    def _stored(self, source: Weights, name: str, shape: tuple[int, int, int]) -> Part:
        """Return all experts' weights. As in transformers, a shape that fits is never
        transposed."""
        turned = self.transposed and source.shape_of(name) != shape
        stored = (shape[0], shape[2], shape[1]) if turned else shape
        return Part(name, stored, transposed=turned, least_bits=4)


def _apart(source: Weights, parts: list[Part], shard: Shard | None) -> tuple[Linear, ...]:
    return tuple(source.linear(part, shard=shard) for part in parts)


@dataclass(frozen=True, slots=True)
class LoadedExperts(LoadedFeedForward):
    """Weights. `router` has one row per expert and a last row for the shared expert's gate, if
    there is one; `gate_up`, `down` and `sites` are arguments of `routed_experts`, `sigmoids` is one
    of `route`."""

    routing: Routing
    router: Linear
    gate_up: torch.Tensor | Stored | Sequence[Linear]
    down: torch.Tensor | Stored | Sequence[Linear]
    shared: LoadedMlp | None
    ranks: Ranks
    sites: tuple[int, int]
    sigmoids: Sigmoids | None

    def apply(
        self, x: Normed, residual: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        deterministic, count = step.deterministic, self.routing.num_experts
        scores = self.router(x.rows, deterministic=deterministic, changes=step.changes)
        weights, ids = route(scores[:, :count], self.routing.top_k, self.sigmoids)
        gate = scores[:, count:]
        if self.ranks.shared:
            out = self._routed(x, weights, ids, step, None).float()
            if self.shared is not None:
                hidden = self.shared.hidden(x, step)
                part = self.shared.down.weight.partial(
                    hidden, deterministic=deterministic, changes=step.changes
                )
                out = out + times_sigmoid(part, gate.float())
            return added(self.ranks, out, residual), ids
        addends = Addends(residual)
        if self.shared is not None:
            hidden = self.shared.hidden(x, step)
            down = self.shared.down.weight
            whole = down(hidden, deterministic=deterministic, changes=step.changes)
            addends = Addends(residual, whole, gate)
        return self._routed(x, weights, ids, step, addends), ids

    def _routed(
        self,
        x: Normed,
        weights: torch.Tensor,
        ids: torch.Tensor,
        step: Step,
        addends: Addends | None,
    ) -> torch.Tensor:
        return routed_experts(
            x.rows,
            weights,
            ids,
            self.gate_up,
            self.down,
            deterministic=step.deterministic,
            changes=step.changes,
            sites=self.sites,
            addends=addends,
        )

    def lower(self, program: Program) -> None:
        gate_up, down = self.gate_up, self.down
        if isinstance(gate_up, torch.Tensor | Stored) or isinstance(down, torch.Tensor | Stored):
            raise UnsupportedError("experts in one tensor")
        program.check_whole(moe_intermediate_size=down[0].depth)
        scores = program.view("scores", self.router.columns, torch.float32)
        program.product(self.router, program.normed, scores, "SCORES")
        more: dict[str, object] = {}
        if self.shared is not None:
            assert self.shared.up is not None, "on a CPU gate and up lie apart"
            more["shared"] = program.gated(self.shared.gate, self.shared.up)
            more["shared_down"] = program.weight(self.shared.down.weight)
            more["shared_site"] = self.shared.down.weight.site
        if self.sigmoids is not None:
            bias = self.sigmoids.bias
            more["sigmoid"], more["scale"] = 1, self.sigmoids.scale
            more["floor"] = self.sigmoids.floor
            more["bias"] = None if bias is None else program.vector(bias)
        program.emit(
            "Experts",
            x=program.normed,
            scores=scores,
            out=program.residual,
            apart=program.shared,
            experts=self.routing.num_experts,
            top_k=self.routing.top_k,
            hidden=down[0].columns,
            index=program.next_expert_layer(self.routing.top_k),
            ungated=int(not has_gates(gate_up, down)),
            gate_up=program.weights(gate_up),
            down=program.weights(down),
            gate_up_sites=program.sites(gate_up),
            down_sites=program.sites(down),
            **more,
        )
        program.reduce()
