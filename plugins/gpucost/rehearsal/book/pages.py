"""What does the book remember? Instances and launches in memory, each change in the journal before it counts.

A change that the journal could not take has not happened: nothing here differs from before, and the caller is told
by the journal's error. All of it is called inside the book's lock.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Protocol

from pydantic import TypeAdapter

from gpucost.rehearsal.book.records import HOLDING, Instance, Launch


class Journal(Protocol):
    """Where every change is written down, in order."""

    def write(self, event: str, **facts: Any) -> None:
        """Append one event; raises, with the journal as it was, when that is not possible."""
        ...


class Pages:
    """Everything that the book knows.

    Args:
        journal: every change is appended to it first.
        now: the present second of the rehearsal clock.
        on_change: told of each instance before (None for a new one) and after a change.

    Attributes:
        instances: every instance that ever was, by id, in order of launch.
        holding: those of them that occupy a place.
        launches: every launch by id, in order.
    """

    def __init__(
        self,
        journal: Journal,
        now: Callable[[], datetime],
        on_change: Callable[[Instance | None, Instance], None],
    ) -> None:
        self._journal = journal
        self._now = now
        self._on_change = on_change
        self._of_token: dict[tuple[str, str, str], str] = {}
        self.instances: dict[str, Instance] = {}
        self.holding: dict[str, Instance] = {}
        self.launches: dict[str, Launch] = {}

    def restore(self, events: Iterable[dict[str, Any]]) -> None:
        """Take up what an earlier life wrote into its journal; events of other kinds are left out."""
        instances: dict[str, dict[str, Any]] = {}
        launches: dict[str, dict[str, Any]] = {}
        for event in events:
            if event["event"] == "launch":
                launches[event["launch"]["id"]] = event["launch"]
                instances |= {one["id"]: one for one in event["instances"]}
            elif event["event"] == "change":
                kept = instances if event["id"] in instances else launches
                kept[event["id"]] |= event["changes"]
        for launch in launches.values():
            self._keep_launch(_launches().validate_json(json.dumps(launch)))
        for instance in instances.values():
            self._keep(_instances().validate_json(json.dumps(instance)))

    def next_number(self) -> int:
        """A number that no instance has, for the next one; numbers of launches that failed may be missing."""
        return 1 + max((one.number for one in self.instances.values()), default=-1)

    def of_token(self, kind: str, region: str, token: str) -> Launch | None:
        """The launch that a client token stands for; None for a token that nobody used."""
        return self.launches.get(self._of_token.get((kind, region, token), ""))

    def add(self, launch: Launch, instances: Sequence[Instance]) -> None:
        """A launch with what it launched, all or nothing."""
        self._journal.write(
            "launch",
            at=launch.created,
            launch=_launches().dump_python(launch, mode="json"),
            instances=[_instances().dump_python(one, mode="json") for one in instances],
        )
        self._keep_launch(launch)
        for instance in instances:
            self._keep(instance)
            self._on_change(None, instance)

    def change(self, instance: Instance, **changes: Any) -> Instance:
        """The instance with other values in some fields."""
        after = replace(instance, **changes)
        self._write(instance.id, _instances().dump_python(after, mode="json", include=set(changes)))
        self._keep(after)
        self._on_change(instance, after)
        return after

    def change_launch(self, launch: Launch, **changes: Any) -> None:
        """The launch with other values in some fields."""
        after = replace(launch, **changes)
        self._write(launch.id, _launches().dump_python(after, mode="json", include=set(changes)))
        self._keep_launch(after)

    def retag(self, ids: Sequence[str], change: Callable[[Mapping[str, str]], dict[str, str]]) -> list[str]:
        """Change the tags of instances and launches; returns the ids that are unknown, and then changes nothing."""
        unknown = [each for each in ids if each not in self.instances and each not in self.launches]
        for resource in ids if not unknown else ():
            if resource in self.instances:
                instance = self.instances[resource]
                self.change(instance, tags=change(instance.tags))
            else:
                launch = self.launches[resource]
                self.change_launch(launch, tags=change(launch.tags))
        return unknown

    def _write(self, resource: str, changes: dict[str, Any]) -> None:
        self._journal.write("change", id=resource, at=self._now(), changes=changes)

    def _keep(self, instance: Instance) -> None:
        self.instances[instance.id] = instance
        if instance.state in HOLDING:
            self.holding[instance.id] = instance
        else:
            self.holding.pop(instance.id, None)

    def _keep_launch(self, launch: Launch) -> None:
        self.launches[launch.id] = launch
        if launch.client_token:
            self._of_token[launch.kind, launch.region, launch.client_token] = launch.id


@functools.cache
def _instances() -> TypeAdapter[Instance]:
    return TypeAdapter(Instance)


@functools.cache
def _launches() -> TypeAdapter[Launch]:
    return TypeAdapter(Launch)
