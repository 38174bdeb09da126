"""What did a job cost, attempt by attempt, and was it worth it? Pure: facts and charges in, a report out.

Definitions, kept simple enough to check by hand:

- **Lost steps** of an attempt: those that it did and a later attempt had to do again; for the newest attempt, when
  it ended unfinished, those after its newest checkpoint.
- **Lost seconds and money**: the attempt's billed time and charge, in proportion to its lost steps. An attempt that
  ended unfinished without one step lost all of it. (An interruption that the provider waives loses time, no money.)
- **On demand**: the same machine seconds at the on-demand price, without the lost seconds, which on-demand would not
  have needed. That is the stricter comparison: lost work lowers the savings. The launches that interruptions
  repeated are left in, as no fact tells them from training.
- **Savings**: 1 - cost / on demand; negative when it was dearer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from gpucost.ledger.charge import Charge
from gpucost.money import MICRO, Money
from gpucost.reasons import Reason


@dataclass(frozen=True)
class AttemptFacts:
    """What the books know of one attempt; steps are None before the first was reported."""

    number: int
    started_at: datetime
    ended_at: datetime | None
    reason: str | None
    first_step: int | None
    last_step: int | None
    saved_step: int | None

    @property
    def done(self) -> int:
        """Steps that it did."""
        return max((self.last_step or 0) - (self.first_step or 0), 0)

    @property
    def unfinished(self) -> bool:
        """Whether it ended before the training did."""
        return self.ended_at is not None and self.reason != Reason.COMPLETED


@dataclass(frozen=True)
class LeaseFacts:
    """What the books know of one lease."""

    id: str
    attempt: int
    pool: str
    launched_at: datetime | None
    ended_at: datetime | None


class AttemptLine(BaseModel):
    """One attempt in the report."""

    model_config = ConfigDict(frozen=True)

    attempt: int
    pools: tuple[str, ...] = Field(description="Keys of the pools of its machines.")
    start: AwareDatetime | None = Field(description="First launch, or the attempt's start where none is known.")
    end: AwareDatetime | None
    hours: float = Field(description="Billed machine-hours.")
    cost: Money
    on_demand: Money | None = Field(description="The same seconds at the on-demand price, lost ones included.")
    first_step: int | None
    last_step: int | None
    lost_steps: int
    lost_seconds: float
    lost_cost: Money
    reason: str | None


class JobReport(BaseModel):
    """What a job cost and what it was worth; see the module for the definitions."""

    model_config = ConfigDict(frozen=True)

    job: str
    name: str
    project: str
    attempts: tuple[AttemptLine, ...]
    cost: Money
    on_demand: Money | None = Field(description="What the useful machine seconds would have cost on demand.")
    savings: float | None = Field(description="Fraction saved against on-demand; None where its price is unknown.")
    hours: float
    interruptions: int
    lost_steps: int
    lost_seconds: float
    lost_cost: Money

    def markdown(self) -> str:
        """The report as a page."""
        saved = "unknown" if self.savings is None else f"{self.savings:.1%}"
        head = [
            f"# {self.name}",
            "",
            f"Job `{self.job}`, project {self.project}.",
            "",
            f"- cost: {self.cost}",
            f"- on demand, useful seconds only: {self.on_demand or 'unknown'}; saved: {saved}",
            f"- machine-hours: {self.hours:.4f}; interruptions: {self.interruptions}",
            f"- lost: {self.lost_steps} steps, {self.lost_seconds:.0f} s, {self.lost_cost}",
            "",
            "| attempt | pool | start (UTC) | end (UTC) | hours | cost | on demand | steps | lost steps | ended by |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        return "\n".join([*head, *(_row(line) for line in self.attempts), ""])


def make_report(
    job: str,
    name: str,
    project: str,
    attempts: Sequence[AttemptFacts],
    leases: Sequence[LeaseFacts],
    charges: Sequence[Charge],
) -> JobReport:
    """Bring attempts, leases and charges of one job together.

    Args:
        job: the job's key.
        name: what people call it.
        project: whose budget.
        attempts: its attempts, by number.
        leases: the leases that served it.
        charges: the newest revision of each of its charges.
    """
    currency = charges[0].amount.currency if charges else "USD"
    known = {facts.number: facts for facts in attempts}
    numbers = sorted({*known, *(lease.attempt for lease in leases)})
    useful: list[Money | None] = []
    lines = []
    for number in numbers:
        mine = [lease for lease in leases if lease.attempt == number]
        paid = [charge for charge in charges if charge.lease_id in {lease.id for lease in mine}]
        facts = known.get(number)
        lost_steps, lost = _lost(facts, [later for later in attempts if later.number > number])
        line = _line(number, facts, mine, paid, lost_steps, lost, currency)
        lines.append(line)
        if paid:
            useful.append(None if line.on_demand is None else _part(line.on_demand, 1 - lost))
    cost = add((charge.amount for charge in charges), currency)
    on_demand = None if not useful or None in useful else add((part for part in useful if part), currency)
    return JobReport(
        job=job,
        name=name,
        project=project,
        attempts=tuple(lines),
        cost=cost,
        on_demand=on_demand,
        savings=float(1 - cost.amount / on_demand.amount) if on_demand and on_demand.amount else None,
        hours=sum(line.hours for line in lines),
        interruptions=sum(line.reason in (Reason.INTERRUPTED, Reason.NODE_LOST) for line in lines),
        lost_steps=sum(line.lost_steps for line in lines),
        lost_seconds=sum(line.lost_seconds for line in lines),
        lost_cost=add((line.lost_cost for line in lines), currency),
    )


def add(amounts: Iterable[Money], currency: str | None = None) -> Money:
    """The sum; for nothing, zero in `currency`, dollars where it is left out.

    Raises:
        CurrencyMismatch: the amounts are in several currencies.
    """
    total = None if currency is None else Money.zero(currency)
    for amount in amounts:
        total = amount if total is None else total + amount
    return total or Money.zero()


def _lost(facts: AttemptFacts | None, later: Sequence[AttemptFacts]) -> tuple[int, Fraction]:
    """Steps that this attempt did in vain, and the part of its time that they took."""
    if facts is None:
        return 0, Fraction(0)
    first, last = facts.first_step or 0, facts.last_step or 0
    resumed = [other.first_step for other in later if other.first_step is not None]
    if resumed:
        kept = min(resumed)
    elif facts.unfinished:
        kept = first if facts.saved_step is None else facts.saved_step
    else:
        kept = last
    lost = min(max(last - kept, 0), facts.done)
    if facts.done:
        return lost, Fraction(lost, facts.done)
    return 0, Fraction(1 if facts.unfinished else 0)


def _line(
    number: int,
    facts: AttemptFacts | None,
    leases: Sequence[LeaseFacts],
    paid: Sequence[Charge],
    lost_steps: int,
    lost: Fraction,
    currency: str,
) -> AttemptLine:
    cost = add((charge.amount for charge in paid), currency)
    compared = [charge.on_demand_amount for charge in paid]
    seconds = sum((_seconds(charge) for charge in paid), Fraction(0))
    launches = [lease.launched_at for lease in leases if lease.launched_at]
    ends = [lease.ended_at for lease in leases if lease.ended_at]
    return AttemptLine(
        attempt=number,
        pools=tuple(sorted({lease.pool for lease in leases})),
        start=min(launches) if launches else (facts.started_at if facts else None),
        end=max(ends) if ends and len(ends) == len(leases) else (facts.ended_at if facts else None),
        hours=float(seconds / 3600),
        cost=cost,
        on_demand=None if not paid or None in compared else add(amount for amount in compared if amount),
        first_step=facts.first_step if facts else None,
        last_step=facts.last_step if facts else None,
        lost_steps=lost_steps,
        lost_seconds=float(seconds * lost),
        lost_cost=_part(cost, lost),
        reason=facts.reason if facts else None,
    )


def _seconds(charge: Charge) -> Fraction:
    """The machine seconds that a charge stands for: the lease's billed ones times the job's part."""
    share = Fraction(charge.lines[0].share) if charge.lines else Fraction(0)
    return charge.seconds * share


def _part(amount: Money, part: Fraction) -> Money:
    micros = round(Fraction(amount.amount) * part / Fraction(MICRO))
    return Money(amount=MICRO * micros, currency=amount.currency)


def _row(line: AttemptLine) -> str:
    first = "-" if line.first_step is None else line.first_step
    last = "-" if line.last_step is None else line.last_step
    cells = (
        line.attempt,
        ", ".join(line.pools) or "-",
        f"{line.start:%Y-%m-%d %H:%M:%S}" if line.start else "-",
        f"{line.end:%Y-%m-%d %H:%M:%S}" if line.end else "-",
        f"{line.hours:.4f}",
        line.cost,
        line.on_demand or "-",
        f"{first} to {last}",
        line.lost_steps,
        line.reason or "running",
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
