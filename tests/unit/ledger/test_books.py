"""The books: charged once, corrected by a new revision, read back as a job's cost and report."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select

from gpucost.capacity.lease import Lease, LeaseState
from gpucost.db.engine import Database
from gpucost.db.tables import AllocationRow, AttemptRow, ChargeRow, LeaseRow
from gpucost.ledger.billing import MachineUse
from gpucost.ledger.books import Books
from gpucost.ledger.charge import Charge, ChargeKind
from gpucost.market.pool import CapacityType, Pool
from gpucost.market.quote import PricePoint
from gpucost.money import InstanceHourPrice, Money
from tests.fakes.rows import job_row

LAUNCH = datetime(2026, 11, 30, 12, tzinfo=UTC)
SPOT = [PricePoint(since=LAUNCH - timedelta(hours=1), price=InstanceHourPrice(amount=Decimal("0.36")))]
ON_DEMAND = InstanceHourPrice(amount=Decimal("1.08"))
SOURCE = "DescribeInstances, DescribeSpotPriceHistory"


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    database = Database(f"sqlite:///{tmp_path}/gpucost.db")
    database.migrate()
    yield database
    database.close()


@pytest.fixture
def books(db: Database) -> Books:
    return Books(db)


def add_job(db: Database, key: str) -> None:
    with db.transaction() as session:
        session.add(job_row(key, LAUNCH, name="digits"))


def add_lease(db: Database, id: str, job: str = "job", attempt: int = 1, **changes: Any) -> Lease:
    facts: dict[str, Any] = {"capacity_type": CapacityType.SPOT, "launched_at": LAUNCH, "ended_at": None} | changes
    pool = Pool(
        provider="aws",
        region="us-east-1",
        zone="us-east-1a",
        zone_id="use1-az1",
        instance_type="g4dn.xlarge",
        capacity_type=facts["capacity_type"],
    )
    lease = Lease(
        id=id,
        job=job,
        attempt=attempt,
        pool=pool,
        state=LeaseState.ACTIVE,
        owner="o",
        client_token=id,
        price=InstanceHourPrice(amount=Decimal("0.36")),
        on_demand_price=ON_DEMAND,
        requested_at=LAUNCH,
        expires_at=LAUNCH + timedelta(days=1),
        launched_at=facts["launched_at"],
        ended_at=facts["ended_at"],
    )
    with db.transaction() as session:
        session.add(
            LeaseRow(
                **lease.model_dump(exclude={"pool", "price", "on_demand_price"}),
                **pool.model_dump(),
                price=Decimal("0.36"),
                on_demand_price=ON_DEMAND.amount,
                currency="USD",
            )
        )
    return lease


def allocate(db: Database, lease: str, job: str, share: str = "1", attempt: int = 1, end: int | None = None) -> None:
    stop = None if end is None else LAUNCH + timedelta(seconds=end)
    with db.transaction() as session:
        session.add(
            AllocationRow(lease_id=lease, job=job, attempt=attempt, share=Decimal(share), start=LAUNCH, end=stop)
        )


def use(seconds: int, ended_by: str = "us", start: datetime = LAUNCH) -> MachineUse:
    return MachineUse.model_validate(
        {
            "launched_at": start,
            "ended_at": start + timedelta(seconds=seconds),
            "capacity_type": "spot",
            "ended_by": ended_by,
        }
    )


def settle(books: Books, lease: Lease, life: MachineUse, prices: list[PricePoint] = SPOT, later: int = 0) -> Charge:
    return books.settle(lease, life, prices, ON_DEMAND, LAUNCH + timedelta(hours=9 + later), SOURCE)


def rows(db: Database) -> list[tuple[str, int, Decimal]]:
    with db.transaction() as session:
        found = session.scalars(select(ChargeRow).order_by(ChargeRow.id))
        return [(row.job, row.revision, row.amount) for row in found]


def test_a_lease_is_charged_to_its_job_once(db: Database, books: Books) -> None:
    add_job(db, "job")
    lease = add_lease(db, "lease")
    allocate(db, "lease", "job")
    charge = settle(books, lease, use(1000))
    settle(books, lease, use(1000), later=1)
    assert (charge.amount, charge.on_demand_amount, charge.kind) == (
        Money.usd("0.1"),
        Money.usd("0.3"),
        ChargeKind.COMPUTE,
    )
    assert rows(db) == [("job", 1, Decimal("0.1"))]
    assert books.job_cost("job") == Money.usd("0.1")
    assert books.charges(job="job") == [charge]
    assert books.lease_charge("lease") == charge


def test_a_late_fact_makes_a_revision_and_the_newest_counts(db: Database, books: Books) -> None:
    add_job(db, "job")
    lease = add_lease(db, "lease")
    for seconds in (1000, 2000, 2000, 1000):
        settle(books, lease, use(seconds))
    assert rows(db) == [("job", 1, Decimal("0.1")), ("job", 2, Decimal("0.2")), ("job", 3, Decimal("0.1"))]
    assert books.job_cost("job") == Money.usd("0.1")


def test_an_interruption_that_is_waived_still_has_a_row(db: Database, books: Books) -> None:
    add_job(db, "job")
    settle(books, add_lease(db, "lease"), use(1000, "provider"))
    assert rows(db) == [("job", 1, Decimal(0))]
    assert books.charges(job="job")[0].on_demand_amount == Money.usd("0.3")


def test_a_shared_lease_is_split_exactly_and_split_again_when_the_shares_change(db: Database, books: Books) -> None:
    for key in ("job", "other"):
        add_job(db, key)
    lease = add_lease(db, "lease")
    allocate(db, "lease", "other", share="0.3")
    whole = settle(books, lease, use(1001))
    assert whole.amount == Money.usd("0.1001")
    assert (books.job_cost("job"), books.job_cost("other")) == (Money.usd("0.07007"), Money.usd("0.03003"))
    assert books.lease_charge("lease") == whole
    with db.transaction() as session:
        session.execute(AllocationRow.__table__.delete())  # type: ignore[attr-defined]
    settle(books, lease, use(1001))
    assert (books.job_cost("job"), books.job_cost("other")) == (whole.amount, Money.zero())
    settle(books, lease, use(1001), later=1)
    assert len(rows(db)) == 4


def test_a_lease_without_a_row_is_refused(db: Database, books: Books) -> None:
    add_job(db, "job")
    lease = add_lease(db, "lease").model_copy(update={"id": "unknown"})
    with pytest.raises(LookupError, match="'unknown' has no row"):
        settle(books, lease, use(10))


def test_two_who_settle_from_their_own_connections_write_one_row(db: Database, books: Books) -> None:
    add_job(db, "job")
    lease = add_lease(db, "lease")
    other = Database(str(db.url))
    settle(Books(other), lease, use(1000))
    settle(books, lease, use(1000))
    other.close()
    assert len(rows(db)) == 1


def test_the_cost_so_far_counts_what_runs_and_nothing_twice(db: Database, books: Books) -> None:
    add_job(db, "job")
    over, running = add_lease(db, "over"), add_lease(db, "running")
    not_yet = add_lease(db, "not-yet", launched_at=None)
    settle(books, over, use(1000))
    now = LAUNCH + timedelta(seconds=500)
    live = [(over, SPOT), (running, SPOT), (not_yet, SPOT)]
    assert books.cost_so_far("job", live, now) == Money.usd("0.15")
    assert books.cost_so_far("job", [(running, [])], now) == Money.usd("0.15"), "the price it was bought at stands in"
    allocate(db, "running", "job", share="0.5")
    assert books.cost_so_far("job", [(running, SPOT)], now) == Money.usd("0.15"), "the holder carries the rest"


def test_a_running_on_demand_lease_counts_by_its_list_price(db: Database, books: Books) -> None:
    add_job(db, "job")
    lease = add_lease(db, "lease", capacity_type=CapacityType.ON_DEMAND)
    assert books.cost_so_far("job", [(lease, [])], LAUNCH + timedelta(seconds=500)) == Money.usd("0.15")


def test_a_job_without_a_charge_cost_nothing(db: Database, books: Books) -> None:
    add_job(db, "job")
    assert books.job_cost("job") == Money.zero()
    assert books.lease_charge("lease") is None


def add_attempt(db: Database, number: int, start: int, end: int | None, **changes: Any) -> None:
    facts: dict[str, Any] = {"reason": None, "first_step": None, "last_step": None, "saved_step": None} | changes
    ended = None if end is None else LAUNCH + timedelta(seconds=end)
    with db.transaction() as session:
        begun = LAUNCH + timedelta(seconds=start)
        session.add(AttemptRow(job="job", number=number, started_at=begun, ended_at=ended, **facts))


def test_the_report_of_a_job_that_was_interrupted_once(db: Database, books: Books) -> None:
    add_job(db, "job")
    second_launch = LAUNCH + timedelta(seconds=5000)
    one = add_lease(db, "one", ended_at=LAUNCH + timedelta(seconds=4000))
    two = add_lease(db, "two", attempt=2, launched_at=second_launch, ended_at=second_launch + timedelta(seconds=1000))
    for number, id in ((1, "one"), (2, "two")):
        allocate(db, id, "job", attempt=number)
    add_attempt(db, 1, 0, 4000, reason="interrupted", first_step=0, last_step=400, saved_step=300)
    add_attempt(db, 2, 5000, 6000, reason="completed", first_step=300, last_step=400, saved_step=400)
    settle(books, one, use(4000, "provider"))
    settle(books, two, use(1000, start=second_launch))

    report = books.report("job")

    first, second = report.attempts
    assert (first.pools, first.cost) == (("aws/use1-az1/g4dn.xlarge/spot",), Money.usd("0.4"))
    assert first.hours == pytest.approx(4000 / 3600)
    assert (first.start, first.end) == (LAUNCH, LAUNCH + timedelta(seconds=4000))
    assert (first.lost_steps, first.lost_seconds, first.lost_cost) == (100, 1000, Money.usd("0.1"))
    assert (second.lost_steps, second.first_step, second.last_step) == (0, 300, 400)
    assert report.cost == Money.usd("0.5")
    # 4000 + 1000 seconds less the 1000 that were lost, at 1.08 an hour.
    assert report.on_demand == Money.usd("1.2")
    assert report.savings == pytest.approx(1 - 0.5 / 1.2)
    assert (report.interruptions, report.lost_steps, report.lost_cost) == (1, 100, Money.usd("0.1"))
    assert json.loads(report.model_dump_json())["cost"] == {"amount": "0.500000", "currency": "USD"}
    page = report.markdown()
    assert "| 1 | aws/use1-az1/g4dn.xlarge/spot | 2026-11-30 12:00:00 |" in page
    assert "saved: 58.3%" in page


def test_a_waived_interruption_loses_time_but_no_money(db: Database, books: Books) -> None:
    add_job(db, "job")
    lease = add_lease(db, "one", ended_at=LAUNCH + timedelta(seconds=1000))
    add_attempt(db, 1, 0, 1000, reason="node_lost", first_step=0, last_step=100, saved_step=40)
    settle(books, lease, use(1000, "provider"))
    report = books.report("job")
    assert (report.lost_steps, report.lost_seconds, report.lost_cost) == (60, 600, Money.zero())
    assert (report.cost, report.on_demand, report.savings) == (Money.zero(), Money.usd("0.12"), 1.0)


@pytest.mark.parametrize(
    ("attempts", "lost"),
    [
        ([(0, 100, None, "interrupted")], [100]),
        ([(0, 100, 80, None)], [0]),
        ([(0, 100, 80, "interrupted"), (None, None, None, None)], [20, 0]),
        ([(0, 100, 80, "interrupted"), (80, 150, 120, "interrupted"), (80, 200, 200, "completed")], [20, 70, 0]),
        ([(0, 100, 80, "interrupted"), (80, 150, 120, "interrupted"), (0, 200, 200, "completed")], [100, 70, 0]),
        ([(None, None, None, "node_lost"), (0, 100, 100, "completed")], [0, 0]),
    ],
)
def test_lost_steps_are_those_done_again(
    db: Database, books: Books, attempts: list[tuple[int | None, int | None, int | None, str | None]], lost: list[int]
) -> None:
    add_job(db, "job")
    for number, (first, last, saved, reason) in enumerate(attempts, start=1):
        facts = {"first_step": first, "last_step": last, "saved_step": saved, "reason": reason}
        add_attempt(db, number, number, number + 1 if reason else None, **facts)
    assert [line.lost_steps for line in books.report("job").attempts] == lost


def test_an_attempt_that_never_made_a_step_lost_all_its_time(db: Database, books: Books) -> None:
    add_job(db, "job")
    lease = add_lease(db, "one", ended_at=LAUNCH + timedelta(seconds=4000))
    add_attempt(db, 1, 0, 4000, reason="node_lost")
    settle(books, lease, use(4000, "provider"))
    report = books.report("job")
    assert (report.lost_seconds, report.lost_cost, report.cost) == (4000, Money.usd("0.4"), Money.usd("0.4"))
    assert (report.on_demand, report.savings) == (Money.usd("0"), None)


def test_a_report_of_an_unknown_job_says_so(books: Books) -> None:
    with pytest.raises(LookupError, match="'nobody'"):
        books.report("nobody")


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_the_shares_the_jobs_pay_the_lease_to_the_micro(
    db: Database, books: Books, data: st.DataObject
) -> None:
    mark = uuid.uuid4().hex  # Every example has rows of its own in one database.
    count = data.draw(st.integers(1, 5))
    jobs = [f"{mark}-{index}" for index in range(count)]
    for key in jobs:
        add_job(db, key)
    lease = add_lease(db, mark, job=jobs[0])
    for key in jobs[1:]:
        share = data.draw(st.decimals("0.01", "0.24", places=4))
        allocate(db, mark, key, share=str(share), end=data.draw(st.none() | st.integers(0, 90000)))
    whole = settle(books, lease, use(data.draw(st.integers(0, 90000))))
    paid = sum((books.job_cost(key).amount for key in jobs), Decimal(0))
    assert paid == whole.amount.amount
    with db.transaction() as session:
        booked = session.scalar(select(func.sum(ChargeRow.amount)).where(ChargeRow.lease_id == mark))
    assert booked == paid
