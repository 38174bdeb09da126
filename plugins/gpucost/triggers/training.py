"""Waits for what happens to a job's lease, or for a moment; and ends the machine when a user ends the task.

A trigger serializes its constructor's arguments only, and fields added later have defaults, so that one that was
deferred by an older release still loads. Nothing destructive happens in `cleanup`, which also runs when a
triggerer restarts: only `on_kill`, a user's own action, ends a machine, and only while this try owns it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.triggers.base import BaseTrigger, TriggerEvent

if TYPE_CHECKING:
    from gpucost.hub import Hub
    from gpucost.lifecycle.services import Services

log = logging.getLogger(__name__)

LEAST_SECONDS = 10.0
"""No event earlier than this after `run` began, in real seconds: Airflow 3.3 falsely fails a task whose trigger fires
sooner (docs/decisions/0002-ten-seconds.md)."""

RETRY_SECONDS = 15.0
"""Real seconds until a trigger that could not watch tries again."""

KILL_SECONDS = 25.0
"""Airflow gives `on_kill` 30 seconds; the reaper takes over from there."""

KILLS = 32
"""Tasks that can be ended at once."""

_opening = ThreadPoolExecutor(max_workers=4, thread_name_prefix="gpucost-open")
_killing = ThreadPoolExecutor(max_workers=KILLS, thread_name_prefix="gpucost-kill")
"""Of our own: the event loop's few threads are everybody's, and ending a machine holds one for up to 25 seconds."""


class TrainingTrigger(BaseTrigger):
    """Watches one lease through the hub, or waits until a moment.

    Args:
        job: the job's key.
        owner: the owner token of the try that deferred.
        connections: connection ids for `GpuCostHook`.
        policy: name or dotted path of the policy.
        lease_id: the lease to watch; None: wait for `until`.
        until: ISO time on the job's clock.
    """

    def __init__(
        self,
        job: str,
        owner: str,
        connections: dict[str, str | None],
        policy: str = "greedy",
        lease_id: str | None = None,
        until: str | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.job = job
        self.owner = owner
        self.connections = connections
        self.policy = policy
        self.lease_id = lease_id
        self.until = until

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The class's path and the constructor's arguments."""
        return (
            "gpucost.triggers.training.TrainingTrigger",
            {
                "job": self.job,
                "owner": self.owner,
                "connections": self.connections,
                "policy": self.policy,
                "lease_id": self.lease_id,
                "until": self.until,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Yield one event, never sooner than Airflow can take it."""
        began = time.monotonic()
        event = await self._seen()
        await asyncio.sleep(max(0.0, LEAST_SECONDS - (time.monotonic() - began)))
        yield TriggerEvent(event)  # type: ignore[no-untyped-call]

    async def _seen(self) -> dict[str, Any]:
        """What happened, however long connections, database or store are away before: the machine trains on.

        A trigger that raises would fail its task, and the task's machine with it.
        """
        while True:
            try:
                return await self._next(await _hubs.get(self.connections))
            except Exception:
                log.exception("Job %s: cannot be watched now; tried again in %.0f s", self.job, RETRY_SECONDS)
            await asyncio.sleep(RETRY_SECONDS)

    async def _next(self, hub: Hub) -> dict[str, Any]:
        from gpucost.lifecycle.steps import Event, EventKind

        if self.lease_id is not None:
            event = await hub.watch(self.lease_id, self.owner, self.policy)
            return event.model_dump(mode="json")
        clock = hub.services.clock
        until = datetime.fromisoformat(self.until) if self.until else clock.now()
        await asyncio.sleep(max(0.0, (until - clock.now()).total_seconds() / clock.spec.speed))
        return Event(kind=EventKind.TIME, at=clock.now()).model_dump(mode="json")

    async def on_kill(self) -> None:
        """A user acted on the task: end the machines that this try still owns, unless a new try goes on with them.

        Airflow calls this for clearing as well as for ending. A cleared task's next try adopts the machine, often a
        moment after this is called; ending it then would throw away a good machine.
        """
        hub = await _hubs.get(self.connections)
        loop = asyncio.get_running_loop()
        if await loop.run_in_executor(_killing, goes_on, hub.services, self.job):
            log.info("Job %s: the task was cleared; its next try takes the machine over", self.job)
            return
        await loop.run_in_executor(_killing, stop_job, hub.services, self.job, self.owner)


def goes_on(services: Services, job: str) -> bool:
    """Whether the job's task waits for its next try; when Airflow does not say, no: a leak is worse than a restart."""
    from gpucost.hooks.tasks import is_wanted

    try:
        return is_wanted(services.jobs.load(job)[0])
    except Exception:
        log.exception("Job %s: Airflow did not say whether the task goes on", job)
        return False


def stop_job(services: Services, job: str, owner: str) -> bool:
    """End every machine of the job that `owner` holds, and wait for the cloud's word as long as there is time.

    Returns:
        Whether all are confirmed to be over; what is not, the reaper ends.
    """
    from gpucost.capacity.providers.base import ProviderError
    from gpucost.capacity.store import NotOwner
    from gpucost.lifecycle.course import Course
    from gpucost.reasons import Reason

    job_id, wanted, _ = services.jobs.load(job)
    course = Course(services, job_id, wanted, owner)
    give_up = time.monotonic() + KILL_SECONDS
    while time.monotonic() < give_up:
        try:
            if course.stop(Reason.CANCELLED):
                return True
        except NotOwner:
            # A new try has adopted the lease: it is not ours to end any more.
            return True
        except ProviderError as away:
            log.warning("Job %s: the cloud did not end its machines yet: %s", job, away)
        time.sleep(1.0)
    return False


class _Hubs:
    """The hubs of this process, one per set of connections."""

    _made: ClassVar[dict[tuple[tuple[str, str | None], ...], Hub]] = {}
    _lock: ClassVar[asyncio.Lock | None] = None

    async def get(self, connections: dict[str, str | None]) -> Hub:
        """The hub for these connections; made at first use, off the event loop."""
        if _Hubs._lock is None:
            _Hubs._lock = asyncio.Lock()
        key = tuple(sorted(connections.items()))
        async with _Hubs._lock:
            if key not in self._made:
                loop = asyncio.get_running_loop()
                self._made[key] = await loop.run_in_executor(_opening, _make_hub, connections)
            return self._made[key]


def _make_hub(connections: dict[str, str | None]) -> Hub:
    from gpucost.hooks.gpucost import GpuCostHook
    from gpucost.hub import Hub

    return Hub(GpuCostHook(**connections).services())  # type: ignore[arg-type]


_hubs = _Hubs()
