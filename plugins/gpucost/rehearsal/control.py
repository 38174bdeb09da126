"""The rehearsal's own endpoints, under /rehearsal/: health, clock, status, interruptions, script, invoice."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from gpucost.clock import SpecClock
from gpucost.rehearsal.book.book import Book
from gpucost.rehearsal.book.records import Instance
from gpucost.rehearsal.faults.control import FaultsControl, Reply
from gpucost.rehearsal.interruptions.interrupter import Interrupter
from gpucost.rehearsal.interruptions.script import InterruptionKind, RuleSet, Script
from gpucost.rehearsal.invoice.cur import as_csv, as_rows
from gpucost.rehearsal.invoice.document import as_json
from gpucost.rehearsal.invoice.rule import Line, bill
from gpucost.rehearsal.invoice.usages import usage_of
from gpucost.rehearsal.machines.hypervisor import Hypervisor
from gpucost.rehearsal.market.market import Market
from gpucost.rehearsal.services.moto_side import ACCOUNT
from gpucost.rehearsal.wording import in_one_line


class InterruptRequest(BaseModel):
    """The body of POST /rehearsal/interrupt."""

    model_config = ConfigDict(extra="forbid")

    instance_id: str
    event: InterruptionKind = "notice"


class Control:
    """Answers the rehearsal's own endpoints."""

    def __init__(
        self,
        market: Market,
        book: Book,
        hypervisor: Hypervisor,
        interrupter: Interrupter,
        script: Script,
        clock: SpecClock,
        faults: FaultsControl,
    ) -> None:
        self._market = market
        self._book = book
        self._hypervisor = hypervisor
        self._interrupter = interrupter
        self._script = script
        self._clock = clock
        self._faults = faults
        self._routes: dict[tuple[str, str], Callable[[bytes], Reply]] = {
            ("GET", "health"): lambda _body: self._health(),
            ("GET", "clock"): lambda _body: (200, self._clock.spec.model_dump(mode="json")),
            ("GET", "status"): lambda _body: (200, self.status()),
            ("GET", "invoice"): lambda _body: (200, self.invoice()),
            ("GET", "invoice.csv"): lambda _body: (200, self.cost_and_usage()),
            ("POST", "interrupt"): self._interrupt,
            ("POST", "script"): self._add_rules,
            **faults.routes(),
        }

    def answer(self, method: str, name: str, body: bytes) -> Reply:
        """The answer to one request; what is wrong with it is said in `error`."""
        route = self._routes.get((method, name.strip("/")))
        if route is None:
            known = ", ".join(f"{verb} /rehearsal/{path}" for verb, path in self._routes)
            return 404, {"error": f"{method} /rehearsal/{name}: no such endpoint, expected one of {known}"}
        try:
            return route(body)
        except ValidationError as error:
            return 400, {"error": in_one_line(error, "body")}

    def _health(self) -> Reply:
        ailment = self._hypervisor.ailment()
        return (200, {"status": "ok"}) if ailment is None else (503, {"status": "ill", "error": ailment})

    def status(self) -> dict[str, Any]:
        """Everything that is and was, for people and tests."""
        return {
            "now": self._clock.now().isoformat(),
            "market": self._market.label,
            "regions": self._market.regions,
            "script": self._script.as_json(),
            "faults": self._faults.rules(),
            "instances": [self._instance(one) for one in self._book.every()],
        }

    def _instance(self, one: Instance) -> dict[str, Any]:
        names = ("launched", "ended", "gone", "rebalance_at", "notice_at", "action_at")
        times = {name: getattr(one, name) for name in names}
        return {
            "instance_id": one.id,
            "state": one.state,
            "zone": one.pool.zone,
            "instance_type": one.pool.instance_type,
            "lifecycle": one.lifecycle,
            **{name: moment.isoformat() if moment else None for name, moment in times.items()},
            "notice_is_false": one.action_at is not None and one.noticed_for is None,
            "reason": one.ending.code if one.ending else None,
            "tags": dict(one.tags),
            "folder": str(self._hypervisor.folder(one.id)),
            "pid": self._hypervisor.pid(one.id),
        }

    def invoice(self) -> dict[str, Any]:
        """What every instance cost so far."""
        lines, now = self._bill()
        return as_json(lines, now)

    def cost_and_usage(self) -> str:
        """The same invoice as rows of the Cost and Usage Report, in CSV."""
        lines, _ = self._bill()
        return as_csv(as_rows(lines, account=ACCOUNT))

    def _bill(self) -> tuple[list[Line], datetime]:
        # the instances before the time: none of them is launched after it
        instances = self._book.every()
        now = self._book.now()
        return [bill(usage_of(one, self._market), now) for one in instances], now

    def _interrupt(self, body: bytes) -> Reply:
        wanted = InterruptRequest.model_validate_json(body)
        one = self._book.get(wanted.instance_id)
        if one is None:
            return 404, {"error": f"instance_id: {wanted.instance_id} does not exist; see /rehearsal/status"}
        if one.lifecycle != "spot":
            return 409, {"error": f"instance_id: {one.id} is on demand; EC2 interrupts spot instances only"}
        if not self._interrupter.interrupt(one.id, wanted.event):
            return 409, {"error": f"instance_id: {_why_not(one)}"}
        return 200, self._instance(self._book.get(one.id) or one)

    def _add_rules(self, body: bytes) -> Reply:
        self._script.add(RuleSet.model_validate_json(body).rules)
        return 200, {"rules": self._script.as_json()}


def _why_not(one: Instance) -> str:
    """Why an event of an interruption cannot happen to a spot instance."""
    if not one.living:
        return f"{one.id} is {one.state}, expected one that is pending or running"
    if one.action_at is not None:
        return f"{one.id} has a notice for {one.action_at.isoformat()}; --event no-notice ends it at once"
    return f"{one.id} was recommended for a rebalance already"
