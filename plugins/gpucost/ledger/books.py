"""The books: charges written once, never changed, and read back as the cost of a job.

A charge is computed from what the provider's API shows. When a late fact changes it (a price that moved, an end
that was seen late), the next revision is written; the newest revision counts. Nothing here calls a network: the
caller brings times and prices, and a transaction lasts as long as its few rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from fractions import Fraction

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from gpucost.capacity.lease import Lease
from gpucost.db.engine import Database
from gpucost.db.tables import AttemptRow, ChargeRow, JobRow, LeaseRow
from gpucost.ledger.billing import Bill, MachineUse, rules_for
from gpucost.ledger.charge import Charge, ChargeKind, ChargeLine
from gpucost.ledger.report import JobReport, add, make_report
from gpucost.ledger.rows import (
    allocations_of,
    attempt_facts,
    from_row,
    lease_facts,
    leases_of,
    newest,
    newest_only,
    to_row,
)
from gpucost.ledger.shares import split, weights
from gpucost.market.pool import CapacityType
from gpucost.market.quote import PricePoint
from gpucost.money import InstanceHourPrice, Money


class Books:
    """Reads and writes charges.

    Args:
        db: gpucost's database, migrated.
    """

    def __init__(self, db: Database) -> None:
        self._db = db

    def settle(
        self,
        lease: Lease,
        use: MachineUse,
        spot_prices: Sequence[PricePoint],
        on_demand_price: InstanceHourPrice | None,
        now: datetime,
        source: str,
    ) -> Charge:
        """Charge a lease that is over to the jobs that used it.

        Settling again with the same facts adds nothing; other facts add the next revision.

        Args:
            lease: the lease; its row must exist.
            use: its life, as the provider's API shows it.
            spot_prices: the pool's price history back to the launch; empty for on-demand.
            on_demand_price: the list price, for on-demand and for comparison.
            now: when it is computed.
            source: where times and prices come from, e.g. "DescribeInstances, DescribeSpotPriceHistory".

        Returns:
            The charge of the whole lease; the parts of the jobs are in the books.

        Raises:
            ValueError: a price or the provider's rule is missing, or more of the lease was given away than there was.
            LookupError: the lease has no row.
        """
        bill = rules_for(lease.pool.provider)(use, spot_prices, on_demand_price)
        with self._db.transaction() as session:
            # The lock makes two who settle at once follow each other; the second then finds nothing new.
            locked = select(LeaseRow.id).where(LeaseRow.id == lease.id).with_for_update()
            if session.scalar(locked) is None:
                raise LookupError(f"lease: {lease.id!r} has no row; write its intent before buying")
            parts = weights(lease.job, bill.start, bill.end, allocations_of(session, [lease.id]))
            charges = _charges(lease, bill, parts, now, source)
            old = newest(session, ChargeRow.lease_id == lease.id, ChargeRow.kind == ChargeKind.COMPUTE.value)
            _write(session, charges, {row.job: row for row in old})
        return _charge(lease.id, lease.job, bill, bill.amount, bill.on_demand_amount, bill.lines, now, source)

    def job_cost(self, job: str) -> Money:
        """What `job` has been charged, newest revisions only; zero dollars before its first charge.

        Raises:
            CurrencyMismatch: it was charged in several currencies.
        """
        newest = newest_only(ChargeRow.job == job)
        query = select(ChargeRow.currency, func.sum(ChargeRow.amount)).where(*newest).group_by(ChargeRow.currency)
        with self._db.transaction() as session:
            sums = [Money(amount=amount, currency=currency) for currency, amount in session.execute(query)]
        return add(sums)

    def cost_so_far(self, job: str, live: Iterable[tuple[Lease, Sequence[PricePoint]]], now: datetime) -> Money:
        """What `job` was charged, and what its running leases would be charged if we ended them `now`.

        Args:
            job: the job's key.
            live: leases not yet settled, each with its pool's price history; with none, the price that the lease
                was bought at stands in. Those without a launch time, and those settled meanwhile, add nothing.
            now: the moment to bill up to.
        """
        running = [(lease, prices) for lease, prices in live if lease.launched_at]
        ids = [lease.id for lease, _ in running]
        with self._db.transaction() as session:
            settled = set(session.scalars(select(ChargeRow.lease_id).where(ChargeRow.lease_id.in_(ids))))
            allocations = allocations_of(session, ids)
        total = self.job_cost(job)
        for lease, prices in running:
            if lease.id in settled:
                continue
            bill = running_bill(lease, prices, now)
            mine = [allocation for allocation in allocations if allocation.lease_id == lease.id]
            part = split(bill.amount, weights(lease.job, bill.start, bill.end, mine)).get(job)
            total = add([total, part]) if part else total
        return total

    def lease_charge(self, lease_id: str) -> Charge | None:
        """The charge of a whole lease, over all jobs that shared it; None before it is settled."""
        charges = [charge for charge in self.charges(lease_id=lease_id) if charge.kind is ChargeKind.COMPUTE]
        if not charges:
            return None
        on_demand = [charge.on_demand_amount for charge in charges if charge.on_demand_amount]
        with self._db.transaction() as session:
            holder = session.scalar(select(LeaseRow.job).where(LeaseRow.id == lease_id))
        return charges[0].model_copy(
            update={
                "job": holder,
                "amount": add([charge.amount for charge in charges]),
                "on_demand_amount": add(on_demand) if on_demand else None,
                "lines": tuple(line.model_copy(update={"share": "1"}) for line in charges[0].lines),
            }
        )

    def charges(self, *, job: str | None = None, lease_id: str | None = None) -> list[Charge]:
        """The newest revision of every charge of a job, of a lease, or of both, oldest first."""
        wanted: list[ColumnElement[bool]] = []
        if job is not None:
            wanted.append(ChargeRow.job == job)
        if lease_id is not None:
            wanted.append(ChargeRow.lease_id == lease_id)
        with self._db.transaction() as session:
            return [from_row(row) for row in newest(session, *wanted)]

    def report(self, job: str) -> JobReport:
        """What `job` cost and what it was worth, attempt by attempt; see `JobReport` for the definitions.

        Raises:
            LookupError: no such job.
        """
        with self._db.transaction() as session:
            row = session.get(JobRow, job)
            if row is None:
                raise LookupError(f"job: {job!r} is not in the books; look for its key in table gpucost_job")
            attempts = session.scalars(select(AttemptRow).where(AttemptRow.job == job).order_by(AttemptRow.number))
            facts = [attempt_facts(attempt) for attempt in attempts]
            leases = [lease_facts(lease, number) for lease, number in leases_of(session, job)]
            charges = [from_row(charge) for charge in newest(session, ChargeRow.job == job)]
            return make_report(job, row.name, row.project, facts, leases, charges)


def running_bill(lease: Lease, prices: Sequence[PricePoint], now: datetime) -> Bill:
    """What a running lease would be billed if we ended it `now`.

    Raises:
        ValueError: it was not launched, or a price is missing.
    """
    if lease.launched_at is None:
        raise ValueError(f"lease: {lease.id} has no launched_at, expected a lease that runs")
    use = MachineUse(
        launched_at=lease.launched_at,
        ended_at=max(now, lease.launched_at),
        capacity_type=lease.pool.capacity_type,
        ended_by="us",
    )
    on_demand = lease.pool.capacity_type is CapacityType.ON_DEMAND
    bought_at = [PricePoint(since=lease.launched_at, price=lease.price)]
    on_demand_price = lease.on_demand_price or (lease.price if on_demand else None)
    return rules_for(lease.pool.provider)(use, prices or bought_at, on_demand_price)


def _charges(lease: Lease, bill: Bill, parts: dict[str, Fraction], now: datetime, source: str) -> dict[str, Charge]:
    amounts = split(bill.amount, parts)
    on_demand = split(bill.on_demand_amount, parts) if bill.on_demand_amount else {}
    return {
        job: _charge(
            lease.id,
            job,
            bill,
            amounts[job],
            on_demand.get(job),
            tuple(line.model_copy(update={"share": str(part)}) for line in bill.lines),
            now,
            source,
        )
        for job, part in parts.items()
    }


def _charge(
    lease_id: str,
    job: str,
    bill: Bill,
    amount: Money,
    on_demand: Money | None,
    lines: tuple[ChargeLine, ...],
    now: datetime,
    source: str,
) -> Charge:
    return Charge(
        lease_id=lease_id,
        job=job,
        amount=amount,
        on_demand_amount=on_demand,
        start=bill.start,
        end=bill.end,
        seconds=bill.seconds,
        rule=bill.rule,
        source=source,
        as_of=now,
        lines=lines,
    )


def _write(session: Session, charges: dict[str, Charge], old: dict[str, ChargeRow]) -> None:
    """Add what is new. A job that no longer has a part of the lease gets a revision of zero."""
    model = next(iter(charges.values()))
    nothing = Money.zero(model.amount.currency)
    none = {"amount": nothing, "on_demand_amount": nothing if model.on_demand_amount else None, "lines": ()}
    gone = {job: model.model_copy(update={"job": job, **none}) for job in old if job not in charges}
    for job, charge in (charges | gone).items():
        if job not in old:
            session.add(to_row(charge, revision=1))
        elif not from_row(old[job]).same_facts(charge):
            session.add(to_row(charge, revision=old[job].revision + 1))
