"""Serve's configuration of the replicas: resources, health checks, scaling, routing, shutdown."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, RequestRouterConfig

from vlm_serve.deploy.options import DeployConfig
from vlm_serve.deploy.replica import EngineReplica, ReplicaSetup
from vlm_serve.options.config import SEQUENCE_CHOICES, EngineConfig, Fallback

CHANNELS = 64
"""Calls that a replica takes in addition to requests: one for each gateway's channel."""
STATS_SECONDS = 2.0
HEALTH_SECONDS = 5.0
DIGEST_SECONDS = 5.0
LEAVING_SECONDS = 1.0


def max_open_requests(setup: ReplicaSetup) -> int:
    """Return the limit of open requests per replica; where a GPU's memory decides how many run,
    with the most that may."""
    engine = setup.engine
    decided = isinstance(engine.max_num_seqs, Fallback) and engine.device.startswith("cuda")
    running = SEQUENCE_CHOICES[-1] if decided else engine.max_num_seqs
    return running + setup.server.max_queued_requests


def application(setup: ReplicaSetup, deploy: DeployConfig) -> serve.Application:
    """Build the Serve application of the replicas."""
    engine = setup.engine
    routing: dict[str, Any] = {
        "request_router_class": "vlm_serve.deploy.router:AffinityRouter",
        "request_routing_stats_period_s": STATS_SECONDS,
        "request_routing_stats_timeout_s": HEALTH_SECONDS,
    }
    deployment: Any = serve.deployment(
        EngineReplica,
        name="replicas",
        max_ongoing_requests=max_open_requests(setup) + CHANNELS,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=engine.stall_timeout,
        graceful_shutdown_timeout_s=setup.server.shutdown_timeout + LEAVING_SECONDS,
        graceful_shutdown_wait_loop_s=LEAVING_SECONDS,
        request_router_config=RequestRouterConfig(**routing),
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
        **_resources(engine),
        **_number(deploy),
    )
    bound: serve.Application = deployment.bind(setup)
    return bound


def _resources(engine: EngineConfig) -> dict[str, Any]:
    """Return a replica's resources: all ranks on one machine, as processes of one actor."""
    ranks = engine.tensor_parallel_size
    on_gpus = engine.device.startswith("cuda")
    bundle = {"CPU": float(ranks)} | ({"GPU": float(ranks)} if on_gpus else {})
    actor: dict[str, Any] = {"num_cpus": ranks} | ({"num_gpus": ranks} if on_gpus else {})
    if ranks == 1:
        return {"ray_actor_options": actor}
    group = {"placement_group_bundles": [bundle], "placement_group_strategy": "STRICT_PACK"}
    return {"ray_actor_options": actor, **group}


def _number(deploy: DeployConfig) -> dict[str, Any]:
    if deploy.max_replicas is None:
        return {"num_replicas": deploy.replicas}
    scaling: dict[str, Any] = {
        "min_replicas": deploy.replicas,
        "initial_replicas": deploy.replicas,
        "max_replicas": deploy.max_replicas,
        "policy": {
            "policy_function": f"{__name__}:{WantedReplicas.__name__}",
            "policy_kwargs": {"target": deploy.target_queued_tokens},
        },
    }
    return {"num_replicas": "auto", "autoscaling_config": AutoscalingConfig(**scaling)}


@dataclass
class WantedReplicas:
    """A policy for Serve's autoscaling: the wanted number of replicas.

    Args:
        target: wanted prompt tokens of open requests per replica.
    """

    target: int

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        series = (context.raw_metrics or {}).get("open_tokens", {})
        newest = [values[-1].value for values in series.values() if values]
        wanted = replicas_for(
            int(sum(newest)),
            self.target,
            context.capacity_adjusted_min_replicas,
            context.capacity_adjusted_max_replicas,
        )
        return wanted, {}


def replicas_for(tokens: int, target: int, least: int, most: int) -> int:
    """Return how many replicas so many open prompt tokens need at `target` per replica."""
    return min(most, max(least, math.ceil(tokens / target)))


def with_threads(engine: EngineConfig, processors: int, replicas: int) -> EngineConfig:
    """Give each rank its share of the machine's processors unless `threads` is set.

    By default Ray gives an actor a single thread.
    """
    if engine.threads is not None:
        return engine
    ranks = engine.tensor_parallel_size
    return replace(engine, threads=max(1, processors // (replicas * ranks)))
