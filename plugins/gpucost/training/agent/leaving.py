"""How does a node take its leave? The rest of its log, its exit record, a last heartbeat; within the time it has."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence

from gpucost.clock import Clock
from gpucost.jobstore import ExitRecord, JobStore
from gpucost.reasons import Reason
from gpucost.training.agent.relay import Relay
from gpucost.training.agent.say import say
from gpucost.training.agent.verdict import Ending, verdict
from gpucost.training.agent.watch import Repeat
from gpucost.training.outage import brief, patiently, store_errors

SENDING = "sending"
"""The thread that sends; it must have ended before the last words are sent."""


class Leaving:
    """Ends one attempt.

    Args:
        store: the job's documents.
        relay: sends log and heartbeats.
        attempt: this attempt's number.
        clock: the job's clock.
    """

    def __init__(self, store: JobStore, relay: Relay, attempt: int, clock: Clock) -> None:
        self._store = store
        self._relay = relay
        self._attempt = attempt
        self._clock = clock

    def leave(self, ending: Ending, results: dict[str, float], threads: Sequence[Repeat], until: float) -> Reason:
        """After a program's end.

        Args:
            ending: what is known of it.
            results: final metrics, where they are not the program's last word.
            threads: of the attempt, to be ended.
            until: real monotonic time by which the node must be gone.
        """
        reason, message = verdict(ending)
        result = ending.result
        record = ExitRecord(
            attempt=self._attempt,
            reason=reason,
            message=message,
            exit_code=ending.exit_code,
            at=self._clock.now(),
            step=ending.step,
            saved_step=ending.saved_step,
            results=results or (result.results if result else {}),
            weights_digest=result.weights_digest if result else None,
        )
        return self.close(record, threads, until)

    def refuse(self, reason: Reason, message: str, threads: Sequence[Repeat], until: float) -> Reason:
        """Where no program has run."""
        record = ExitRecord(attempt=self._attempt, reason=reason, message=message, at=self._clock.now())
        return self.close(record, threads, until)

    def close(self, record: ExitRecord, threads: Sequence[Repeat], until: float) -> Reason:
        """Leave with this record; returns its reason, or that the store could not be reached."""
        say(f"{record.reason}: {record.message}" if record.message else str(record.reason))
        for thread in threads:
            # The others are told to end, too, but not waited for: one that hangs must not cost the record its time.
            wait = max(0.1, until - time.monotonic()) if thread.name == SENDING else 0.0
            if not thread.end(wait) and wait:
                say("the object store hangs: leaving without an exit record")
                return Reason.STORE_UNREACHABLE

        def send() -> None:
            self._forward_the_rest()
            self._store.write_exit(record)
            self._relay.beat(exited=record.reason)

        try:
            patiently(send, say, patience=max(0.0, until - time.monotonic()))
        except store_errors() as away:
            say(f"{Reason.STORE_UNREACHABLE}: leaving without an exit record: {brief(away)}")
            return Reason.STORE_UNREACHABLE
        return record.reason

    def _forward_the_rest(self) -> None:
        try:
            self._relay.forward(final=True)
        except store_errors():
            raise
        except Exception:  # noqa: BLE001
            # Whatever it is that cannot be sent: why the attempt ended is worth more.
            say(f"the end of log or metrics is left out: {traceback.format_exc().strip()}")
