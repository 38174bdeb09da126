"""What does the API not show yet? Eventual consistency: what was just created stays unseen for a moment.

Source: https://docs.aws.amazon.com/ec2/latest/devguide/eventual-consistency.html. EC2 gives no figure; ours is a
random part of a second or two. The order itself is done at once, and its repeat under the same token is answered.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

MOST_REHEARSAL_S = 300.0
"""However fast the rehearsal clock runs, nothing stays unseen for longer on it: EC2 is not away for hours either."""


def longest_real_s(wanted_real_s: float, speed: float) -> float:
    """The longest lag in real seconds: what was asked for, and at most five minutes of the rehearsal clock."""
    return min(wanted_real_s, MOST_REHEARSAL_S / speed)


class Visibility:
    """Which resources the Describe actions know already; safe to use from many threads.

    What it was not told of is seen: after a restart of the rehearsal everything is.

    Args:
        longest_real_s: the longest lag, real seconds; 0 for none.
        seed: of the lags, which are drawn one for each resource, in the order of their creation.
        monotonic: real time.
    """

    def __init__(
        self, longest_real_s: float = 0.0, seed: int = 0, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._longest_real_s = longest_real_s
        self._monotonic = monotonic
        self._chance = random.Random(f"{seed}/visibility")  # noqa: S311 (lags, not secrets)
        self._lock = threading.Lock()
        self._unseen_until: dict[str, float] = {}

    def hide(self, *resources: str) -> None:
        """These were just created. To be called before anybody can look: inside the book's lock."""
        if self._longest_real_s <= 0:
            return
        with self._lock:
            for resource in resources:
                self._unseen_until[resource] = self._monotonic() + self._chance.uniform(0, self._longest_real_s)

    def sees(self, resource: str) -> bool:
        """Whether the API shows the resource already."""
        with self._lock:
            until = self._unseen_until.get(resource)
            if until is None:
                return True
            if self._monotonic() < until:
                return False
            del self._unseen_until[resource]
            return True
