"""How does a step that may fail on any process end the same on all? Each tells its outcome before anybody goes on.

Whatever a process does between two agreements, it always comes to the next one: a failure is kept, told, and raised by
all together. Only what ends the process (a signal, an exit) is not told; the others then get the error of the broken
connection, and torchrun ends them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

from gpucost.jobstore import FencedOut, TornHead
from gpucost.objects import StoreError
from gpucost.training.outage import brief, store_errors
from gpucost.training.ranks import Ranks

Value = TypeVar("Value")


class TornCheckpoint(RuntimeError):
    """A part is missing or has another content than its manifest says; or no checkpoint of the job is whole."""


class _Outcome(NamedTuple):
    """What a process tells: a value, or the kind of its failure and one line about it."""

    value: object = None
    kind: type[Exception] | None = None
    line: str = ""


_KINDS: tuple[type[Exception], ...] = (
    FencedOut,
    TornHead,
    TornCheckpoint,
    ValueError,
    PermissionError,
    StoreError,
    RuntimeError,
)
"""The first kind that anybody tells is raised by all: who is fenced out is so, whatever else went wrong."""


def by_all(ranks: Ranks, work: Callable[[], Value]) -> list[Value]:
    """Everybody works; each gets the small values of all, in the order of ranks.

    Raises:
        FencedOut, TornHead, TornCheckpoint, ValueError, PermissionError, StoreError: as the work did on some process;
            the same on all.
        RuntimeError: the work failed on another process by an error of another kind; that one raises it as it is.
    """
    outcome, error = _try(work)
    return _values(ranks, ranks.gather(outcome), error)


def by_first(ranks: Ranks, work: Callable[[], Value]) -> Value:
    """Rank 0 works; everybody gets its small value, or the same kind of error; see `by_all`."""
    outcome, error = _try(work) if ranks.rank == 0 else (_Outcome(), None)
    return _values(ranks, [ranks.broadcast(outcome)], error)[0]


def _try(work: Callable[[], Value]) -> tuple[_Outcome, Exception | None]:
    try:
        return _Outcome(work()), None
    except Exception as error:  # noqa: BLE001 - of whatever kind: it is raised once everybody knows
        return _Outcome(None, _kind(error), brief(error)), error


def _kind(error: Exception) -> type[Exception]:
    if isinstance(error, store_errors()) and not isinstance(error, PermissionError):
        return StoreError
    return next((kind for kind in _KINDS if isinstance(error, kind)), RuntimeError)


def _values(ranks: Ranks, outcomes: list[_Outcome], error: Exception | None) -> list[Value]:
    told = [(_KINDS.index(outcome.kind), rank) for rank, outcome in enumerate(outcomes) if outcome.kind]
    if not told:
        return [cast(Value, outcome.value) for outcome in outcomes]
    index, rank = min(told)
    if error is not None and _kind(error) is _KINDS[index]:
        raise error
    line = outcomes[rank].line
    raise _KINDS[index](f"rank {rank}: {line}" if ranks.size > 1 else line) from error
