"""What the routers of a process tell its front.

Serve carries a router's class to its process with everything in its module, so this is a module of
its own, of which there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Board:
    """Written on a router's thread, read on the front's.

    Attributes:
        replicas: names of those that run.
        left: the last of those that ended in order, or are about to.
        routed: the number of a request -> the replica that has taken it, until it is forgotten.
    """

    replicas: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    routed: dict[int, str] = field(default_factory=dict)


MAX_LEFT = 256

BOARD = Board()
