"""What was shown already need not be made again: most callers ask about the same unchanged instances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec

from gpucost.rehearsal.book.records import Instance
from gpucost.rehearsal.protocol.serializer import Unchanging

P = ParamSpec("P")

MOST_KEPT = 5000
"""Views of one kind, about 5 KB each; when there are more, all are made anew."""


class KeptViews(Generic[P]):
    """The views of one kind, one for each instance, each made once for the same record and the same other facts.

    Safe to use from many threads.

    Args:
        make: the view of an instance, from its record and other facts.
    """

    def __init__(self, make: Callable[Concatenate[Instance, P], dict[str, Any]]) -> None:
        self._make = make
        self._kept: dict[str, tuple[Instance, object, Unchanging]] = {}

    def of(self, one: Instance, *facts: P.args, **more: P.kwargs) -> Unchanging:
        """The view; nobody may change it."""
        kept = self._kept.get(one.id)
        # a record is frozen: after a change it is another object
        if kept is not None and kept[0] is one and kept[1] == (facts, more):
            return kept[2]
        if len(self._kept) >= MOST_KEPT:
            self._kept.clear()
        made = Unchanging(self._make(one, *facts, **more))
        self._kept[one.id] = one, (facts, more), made
        return made
