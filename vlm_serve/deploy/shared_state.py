"""State shared by the gateway and the routers of its process.

Serve pickles a router's class by value, with everything in its module. This state has its own
module, so each process has exactly one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vlm_serve.routing.view import RequestUsage


@dataclass
class SharedState:
    """Written on a router's thread, read on the gateway's event loop.

    Attributes:
        replicas: names of the running replicas.
        admitted: those of them that serve; None: all. Written by the gateway.
        retired: the last MAX_RETIRED replicas to shut down in order, or about to.
        routed: request number -> its replica, until the answer has ended.
        usage: request number -> its usage, from the end of the answer until a router takes it. The
            last MAX_USAGE are kept.
    """

    replicas: tuple[str, ...] = ()
    admitted: frozenset[str] | None = None
    retired: tuple[str, ...] = ()
    routed: dict[int, str] = field(default_factory=dict)
    usage: dict[int, RequestUsage] = field(default_factory=dict)

    def serves(self, name: str) -> bool:
        """Return True if a running replica gets requests."""
        return self.admitted is None or name in self.admitted

    def finish(self, number: int, usage: RequestUsage | None) -> None:
        """Note the end of an answer and its usage, None if unknown. For the gateway."""
        if usage is not None:
            self.usage[number] = usage
            if len(self.usage) > MAX_USAGE:
                for oldest in tuple(self.usage)[:-MAX_USAGE]:
                    self.usage.pop(oldest, None)
        self.routed.pop(number, None)


MAX_RETIRED = 256
MAX_USAGE = 4096

SHARED_STATE = SharedState()
