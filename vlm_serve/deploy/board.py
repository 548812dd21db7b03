"""What the routers of a process tell its front.

Serve carries a router's class to its process with everything in its module, so this is a module of
its own, of which there is one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vlm_serve.routing.view import Spent


@dataclass
class Board:
    """Written on a router's thread, read on the front's.

    Attributes:
        replicas: names of those that run.
        left: the last of those that ended in order, or are about to.
        routed: the number of a request -> the replica that has taken it, until its answer is over.
        spent: the number of a request whose answer is over -> what it has turned out to be, until a
            router takes it; the last MAX_SPENT of them.
    """

    replicas: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    routed: dict[int, str] = field(default_factory=dict)
    spent: dict[int, Spent] = field(default_factory=dict)

    def over(self, number: int, spent: Spent | None) -> None:
        """The answer to a request is over; None: nobody knows what it took. For the front."""
        if spent is not None:
            self.spent[number] = spent
            if len(self.spent) > MAX_SPENT:
                for each in tuple(self.spent)[:-MAX_SPENT]:
                    self.spent.pop(each, None)
        self.routed.pop(number, None)


MAX_LEFT = 256
MAX_SPENT = 4096

BOARD = Board()
