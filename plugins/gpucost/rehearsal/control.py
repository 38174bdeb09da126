"""The rehearsal's own endpoints, under /rehearsal/: health, clock, status, interruptions, script, invoice."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from gpucost.clock import SpecClock
from gpucost.rehearsal.book.book import Book
from gpucost.rehearsal.book.records import Instance
from gpucost.rehearsal.interruptions.script import RuleSet, Script
from gpucost.rehearsal.invoice.rule import Usage, as_json, bill
from gpucost.rehearsal.machines.hypervisor import Hypervisor
from gpucost.rehearsal.market.market import Market

JsonAnswer = tuple[int, dict[str, Any]]


class InterruptRequest(BaseModel):
    """The body of POST /rehearsal/interrupt."""

    model_config = ConfigDict(extra="forbid")

    instance_id: str
    notice: bool = False


class Control:
    """Answers the rehearsal's own endpoints."""

    def __init__(self, market: Market, book: Book, hypervisor: Hypervisor, script: Script, clock: SpecClock) -> None:
        self._market = market
        self._book = book
        self._hypervisor = hypervisor
        self._script = script
        self._clock = clock
        self._routes: dict[tuple[str, str], Callable[[bytes], JsonAnswer]] = {
            ("GET", "health"): lambda _body: (200, {"status": "ok"}),
            ("GET", "clock"): lambda _body: (200, self._clock.spec.model_dump(mode="json")),
            ("GET", "status"): lambda _body: (200, self.status()),
            ("GET", "invoice"): lambda _body: (200, self.invoice()),
            ("POST", "interrupt"): self._interrupt,
            ("POST", "script"): self._add_rules,
        }

    def answer(self, method: str, name: str, body: bytes) -> JsonAnswer:
        """Status and JSON for one request; what is wrong with it is said in `error`."""
        route = self._routes.get((method, name.strip("/")))
        if route is None:
            known = ", ".join(f"{verb} /rehearsal/{path}" for verb, path in self._routes)
            return 404, {"error": f"{method} /rehearsal/{name}: no such endpoint, expected one of {known}"}
        try:
            return route(body)
        except ValidationError as error:
            return 400, {"error": str(error)}

    def status(self) -> dict[str, Any]:
        """Everything that is and was, for people and tests."""
        return {
            "now": self._clock.now().isoformat(),
            "market": self._market.file.label,
            "region": self._market.region,
            "script": self._script.as_json(),
            "instances": [self._instance(one) for one in self._book.every()],
        }

    def _instance(self, one: Instance) -> dict[str, Any]:
        times = {"launched": one.launched, "ended": one.ended, "gone": one.gone, "action_at": one.action_at}
        return {
            "instance_id": one.id,
            "state": one.state,
            "zone": one.pool.zone,
            "instance_type": one.pool.instance_type,
            "lifecycle": one.lifecycle,
            **{name: moment.isoformat() if moment else None for name, moment in times.items()},
            "reason": one.ending.code if one.ending else None,
            "tags": dict(one.tags),
            "folder": str(self._hypervisor.folder(one.id)),
            "pid": self._hypervisor.pid(one.id),
        }

    def invoice(self) -> dict[str, Any]:
        """What every instance cost so far."""
        now = self._book.now()
        return as_json([bill(self._usage(one), now) for one in self._book.every()], now)

    def _usage(self, one: Instance) -> Usage:
        if one.lifecycle == "spot":
            price_at = self._market.prices(one.pool).at
        else:
            list_price = self._market.on_demand(one.pool.instance_type)
            price_at = functools.partial(_constant, list_price)
        return Usage(
            instance_id=one.id,
            instance_type=one.pool.instance_type,
            zone=one.pool.zone,
            lifecycle=one.lifecycle,
            launched=one.launched,
            ended=one.ended,
            interrupted=one.ending is not None and one.ending.by_ec2,
            price_at=price_at,
        )

    def _interrupt(self, body: bytes) -> JsonAnswer:
        wanted = InterruptRequest.model_validate_json(body)
        one = self._book.get(wanted.instance_id)
        if one is None:
            return 404, {"error": f"instance_id: {wanted.instance_id} does not exist; see /rehearsal/status"}
        if one.lifecycle != "spot":
            return 409, {"error": f"instance_id: {one.id} is on demand; EC2 interrupts spot instances only"}
        if not self._hypervisor.interrupt(one.id, notice=wanted.notice):
            return 409, {"error": f"instance_id: {one.id} is {one.state}, or has a notice already"}
        return 200, self._instance(self._book.get(one.id) or one)

    def _add_rules(self, body: bytes) -> JsonAnswer:
        self._script.add(RuleSet.model_validate_json(body).rules)
        return 200, {"rules": self._script.as_json()}


def _constant(price: Decimal, _moment: datetime) -> Decimal:
    return price
