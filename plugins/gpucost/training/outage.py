"""What if the object store is away? It is waited for, within bounds, and told in one line."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from gpucost.objects import Conflict, StoreError

PATIENCE_SECONDS = 60.0
"""Real seconds for which the start of an attempt waits for the store. Below them lie the retries within one call, see
`gpucost.objects`."""
PAUSE_SECONDS = 2.0

Answer = TypeVar("Answer")


def store_errors() -> tuple[type[Exception], ...]:
    """What a call to the object store raises when the store is away, slow, full or refuses."""
    return (StoreError, OSError, Conflict)


def brief(error: BaseException) -> str:
    """The error in one line; libraries append a page for their own developers."""
    return str(error).strip().split("\n", 1)[0].strip() or type(error).__name__


def patiently(
    ask: Callable[[], Answer],
    say: Callable[[str], None],
    *,
    patience: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
    real: Callable[[], float] = time.monotonic,
) -> Answer:
    """What `ask` answers, asked again while the store is away.

    Args:
        ask: a call to the store that may be made twice.
        say: takes one line for people when it has to wait.
        patience: real seconds; None: `PATIENCE_SECONDS`.

    Raises:
        one of `store_errors()`: the store was away for longer than `patience`.
    """
    patience = PATIENCE_SECONDS if patience is None else patience
    until = real() + patience
    said = False
    while True:
        try:
            return ask()
        except PermissionError:
            raise  # Waiting brings no credentials.
        except store_errors() as away:
            if real() + PAUSE_SECONDS > until:
                raise
            if not said:
                say(f"waiting up to {patience:g} s for the object store: {brief(away)}")
            said = True
            sleep(PAUSE_SECONDS)
