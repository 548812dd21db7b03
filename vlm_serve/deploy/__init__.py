"""Several engines behind one server: replicas on Ray Serve (docs/scale.md).

main     the command `vlm-serve deploy`: a cluster of its own, and the front in this process
front    the server that clients reach: keys, tenants, seats and budgets are its own
fleet    the front's view of the replicas: one link to each, and who is silent
replica  an engine and its routes in an actor
router   the adapter between Serve's routing and ours
serving  what Serve is told of the replicas
ingress  the front as a Serve application, for KubeRay
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def app(args: Mapping[str, Any]) -> Any:
    """A Serve application for `import_path: vlm_serve.deploy:app`; see `ingress.build`."""
    from vlm_serve.deploy.ingress import build

    return build(args)
