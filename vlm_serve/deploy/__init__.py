"""Several engines behind one server: replicas on Ray Serve (docs/scale.md).

- `main`: the command `vlm-serve deploy`. It starts a Ray cluster and runs the gateway.
- `gateway`: the public server. It checks keys, tenants and limits.
- `orders`: weights, pause and sleep of all replicas.
- `replica_pool`: the gateway's view of the replicas, with one channel to each.
- `replica`: an engine and its routes in a Ray actor.
- `router`: the adapter between Serve's routing and ours.
- `serving`: the replicas' Serve configuration.
- `ingress`: the gateway as a Serve application, for KubeRay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def app(args: Mapping[str, Any]) -> Any:
    """Build a Serve application for `import_path: vlm_serve.deploy:app`; see `ingress.build`."""
    from vlm_serve.deploy.ingress import build

    return build(args)
