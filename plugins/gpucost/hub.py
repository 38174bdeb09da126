"""Who watches everything that lives? One hub per triggerer process; triggers subscribe to it.

However many jobs live, one round costs one listing of heartbeats per thousand leases and one DescribeInstances
per region and thousand; a heartbeat is read only when the listing shows that it changed. What was seen is judged
by a pure function, and a subscriber hears of it only when something must be decided.

Every blocking call runs in threads of the hub's own: the event loop of a triggerer has few. Rounds, the opening of
new watches and the sending of metrics have separate ones, so that none waits for the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime

from gpucost.capacity.lease import Lease
from gpucost.capacity.providers.base import Machine, ProviderError
from gpucost.jobstore import Command, Heartbeat
from gpucost.lifecycle.course import Course
from gpucost.lifecycle.forwarding import Forwarder
from gpucost.lifecycle.planning import TICK
from gpucost.lifecycle.services import Services
from gpucost.lifecycle.steps import CourseEnded, Event, EventKind

log = logging.getLogger(__name__)

ROUND_SECONDS = 2.0
"""Real seconds between two rounds: an interruption is seen within this and one API answer."""

SILENCE_SECONDS = 120.0
"""Real seconds without a new heartbeat after which a node that had one counts as lost: 60 missed beats."""

BOOT_SECONDS = 900.0
"""Real seconds that a node may take to its first heartbeat: image, drivers, download of code."""

UNSEEN_SECONDS = 300.0
"""Real seconds after which an instance that the API does not know counts as gone; new ids take a moment."""

OPENERS = 8
"""Threads that open new watches: after a restart of the triggerer all jobs come at once."""


@dataclass
class Sight:
    """What the hub remembers of one watched lease.

    Args:
        since: when the watch began, real monotonic seconds; later, where the store was away before the first heartbeat.
        beat_at: when the last new heartbeat was seen, likewise.
        seen_at: when the API last knew the machine, likewise.
    """

    lease: Lease
    since: float
    beat: Heartbeat | None = None
    etag: str | None = None
    beat_at: float | None = None
    machine: Machine | None = None
    seen_at: float | None = None


def judge(sight: Sight, now: datetime, monotonic: float) -> Event | None:
    """What a subscriber must hear of, or None; pure.

    Args:
        sight: what is known of the lease.
        now: on the job's clock.
        monotonic: when the last look at heartbeats and machines began, real seconds on the same count as in `sight`.
            Silence is what was not seen then: a look that took long, or this judgement coming late, is ours.
    """
    lease = sight.lease

    def event(kind: EventKind, note: str) -> Event:
        return Event(kind=kind, lease_id=lease.id, at=now, note=note)

    if sight.machine is not None and sight.machine.over:
        return event(EventKind.OVER, f"{lease.instance_id} is gone: {sight.machine.end_code or 'no reason given'}")
    if sight.machine is None and monotonic - (sight.seen_at or sight.since) > UNSEEN_SECONDS:
        return event(EventKind.SILENT, f"EC2 has not known {lease.instance_id} for {UNSEEN_SECONDS:.0f} s")
    if sight.beat is not None and sight.beat.exited is not None:
        return event(EventKind.EXITED, f"the program ended: {sight.beat.exited}")
    if sight.beat_at is None and monotonic - sight.since > BOOT_SECONDS:
        return event(EventKind.SILENT, f"no heartbeat within {BOOT_SECONDS:.0f} s of buying {lease.instance_id}")
    if sight.beat_at is not None and monotonic - sight.beat_at > SILENCE_SECONDS:
        return event(EventKind.SILENT, f"no heartbeat of {lease.instance_id} for {SILENCE_SECONDS:.0f} s")
    if now > lease.expires_at:
        return event(EventKind.EXPIRED, f"planned to end by {lease.expires_at:%Y-%m-%d %H:%M}, and is still there")
    return None


@dataclass
class _Subscriber:
    sight: Sight
    course: Course
    future: asyncio.Future[Event]
    next_plan: datetime
    asked_to_stop: bool = False


class Hub:
    """Watches the leases of all its subscribers.

    Args:
        services: the rooms.
        monotonic: real seconds, for grace periods.
    """

    def __init__(self, services: Services, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.services = services
        self._monotonic = monotonic
        self._subscribers: dict[str, _Subscriber] = {}
        self._rounds: asyncio.Task[None] | None = None
        self._looking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpucost-hub")
        self._opening = ThreadPoolExecutor(max_workers=OPENERS, thread_name_prefix="gpucost-watch")
        self._forwarder = Forwarder(services, monotonic)

    async def watch(self, lease_id: str, owner: str, policy: str) -> Event:
        """Wait until something happens to the lease that its owner must decide on."""
        loop = asyncio.get_running_loop()
        sight, course, leaving = await loop.run_in_executor(self._opening, self._open, lease_id, owner, policy)
        next_plan = self.services.clock.now() + TICK
        subscriber = _Subscriber(sight, course, loop.create_future(), next_plan, asked_to_stop=leaving)
        self._subscribers[lease_id] = subscriber
        if self._rounds is None or self._rounds.done():
            self._rounds = asyncio.create_task(self._run(), name="gpucost-hub")
        try:
            return await subscriber.future
        finally:
            if self._subscribers.get(lease_id) is subscriber:
                del self._subscribers[lease_id]
                self._forwarder.forget(sight.lease.job)

    def _open(self, lease_id: str, owner: str, policy: str) -> tuple[Sight, Course, bool]:
        lease = self.services.leases.get(lease_id)
        job_id, job, _ = self.services.jobs.load(lease.job)
        course = Course(self.services, job_id, job, owner, policy)
        asked = self.services.store(lease.job).control(lease.attempt).command
        return Sight(lease, self._monotonic()), course, asked is Command.SAVE_AND_STOP

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._subscribers:
            watched = list(self._subscribers.values())
            try:
                events = await loop.run_in_executor(self._looking, self._round, watched)
            except Exception:
                log.exception("A round of the hub failed; the next one follows in %s s", ROUND_SECONDS)
                events = {}
            for lease_id, event in events.items():
                subscriber = self._subscribers.get(lease_id)
                if subscriber is not None and not subscriber.future.done():
                    subscriber.future.set_result(event)
            await asyncio.sleep(ROUND_SECONDS)

    def _round(self, watched: list[_Subscriber]) -> dict[str, Event]:
        sights = [subscriber.sight for subscriber in watched]
        moment = self._monotonic()
        self._listen(sights)
        self._look(sights)
        events: dict[str, Event] = {}
        for subscriber in watched:
            now = self.services.clock.now()
            try:
                event = judge(subscriber.sight, now, moment) or self._replan(subscriber, now)
            except Exception:
                # One job's trouble is not the others': they hear of theirs.
                log.exception("Job %s: not judged this round", subscriber.sight.lease.job)
                continue
            if event is not None:
                events[subscriber.sight.lease.id] = event
        return events

    def _listen(self, watched: list[Sight]) -> None:
        """Read the heartbeats that changed."""
        try:
            etags = self.services.live.etags()
        except Exception:
            # While the store cannot be asked, silence is ours, not the nodes'.
            log.exception("The heartbeats could not be listed")
            now = self._monotonic()
            for sight in watched:
                if sight.beat_at is None:
                    sight.since = now
                else:
                    sight.beat_at = now
            return
        heard = self._monotonic()
        for sight in watched:
            etag = etags.get(sight.lease.id)
            if etag is None or etag == sight.etag:
                continue
            sight.beat_at = heard
            try:
                sight.beat, sight.etag = self.services.live.read(sight.lease.id), etag
            except Exception:
                log.exception("Job %s: its heartbeat could not be read", sight.lease.job)
                continue
            self._forwarder.soon(sight.lease.job)

    def _look(self, watched: list[Sight]) -> None:
        """Ask the cloud for the machines' states."""
        for region, sights in _by_region(watched).items():
            ids = [sight.lease.instance_id for sight in sights if sight.lease.instance_id]
            try:
                machines = self.services.provider.describe(region, ids)
            except ProviderError as away:
                # Not knowing is no news of an end: the grace for unseen machines starts when the API answers.
                log.warning("DescribeInstances in %s: %s", region, away)
                now = self._monotonic()
                for sight in sights:
                    sight.seen_at = now
                continue
            seen = self._monotonic()
            for sight in sights:
                sight.machine = machines.get(sight.lease.instance_id or "")
                if sight.machine is not None:
                    sight.seen_at = seen
                    self._note_launch(sight)

    def _note_launch(self, sight: Sight) -> None:
        if sight.lease.launched_at is None and sight.machine is not None and sight.machine.launched_at is not None:
            sight.lease = self.services.leases.seen(sight.lease, sight.machine.launched_at)

    def _replan(self, subscriber: _Subscriber, now: datetime) -> Event | None:
        """Ask the policy once a tick whether it would still stay."""
        if now < subscriber.next_plan or subscriber.asked_to_stop:
            return None
        subscriber.next_plan = now + TICK
        try:
            why = subscriber.course.reason_to_leave(subscriber.sight.lease)
        except (CourseEnded, ProviderError) as unknown:
            log.warning("Job %s: not assessed this tick: %s", subscriber.sight.lease.job, unknown)
            return None
        if why is None:
            return None
        subscriber.asked_to_stop = True
        return Event(kind=EventKind.REPLAN, lease_id=subscriber.sight.lease.id, at=now, note=why)


def _by_region(sights: Iterable[Sight]) -> dict[str, list[Sight]]:
    grouped: dict[str, list[Sight]] = {}
    for sight in sights:
        grouped.setdefault(sight.lease.pool.region, []).append(sight)
    return grouped
