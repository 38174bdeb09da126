"""Why did it end, and what follows? One table for nodes, clouds and operators.

A reason is written down where it is seen (the agent's exit record, a cloud's error, the state of an
instance) and looked up here wherever something must be decided: go on with the same job, try it again
as Airflow's retries allow, leave the pool out for a while, tell somebody.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why an attempt, a purchase or a job ended."""

    COMPLETED = "completed"
    INTERRUPTED = "interrupted"
    NODE_LOST = "node_lost"
    SELF_ENDED = "self_ended"
    STOPPED = "stopped"
    EXPIRED = "expired"
    FENCED = "fenced"
    NO_CAPACITY = "no_capacity"
    PRICE_TOO_LOW = "price_too_low"
    QUOTA = "quota"
    THROTTLED = "throttled"
    CLOUD_ERROR = "cloud_error"
    NOT_AUTHORIZED = "not_authorized"
    BAD_REQUEST = "bad_request"
    BAD_PROGRAM = "bad_program"
    OUT_OF_MEMORY = "out_of_memory"
    DISK_FULL = "disk_full"
    HUNG = "hung"
    CHECKPOINTS_TORN = "checkpoints_torn"
    STORE_UNREACHABLE = "store_unreachable"
    DEADLINE_IMPOSSIBLE = "deadline_impossible"
    BUDGET_EXHAUSTED = "budget_exhausted"
    CANCELLED = "cancelled"


class Then(StrEnum):
    """What follows a reason."""

    DONE = "done"
    """The job is finished."""
    BUY_AGAIN = "buy_again"
    """Not a failure: plan again, buy again, go on from the newest checkpoint."""
    ASK_AGAIN = "ask_again"
    """Nothing was bought; ask the cloud again after a pause, within bounds."""
    RETRY = "retry"
    """The attempt failed: Airflow's `retries` decide."""
    FAIL = "fail"
    """Trying again cannot help: fail now and say what to do."""


@dataclass(frozen=True)
class Rule:
    """What follows one reason.

    Args:
        then: what happens to the job.
        leave_out_hours: how long the pool is not asked again, hours; 0: not left out.
        alert: whether a person should be told even when the job goes on.
        advice: what a person can do about it.
    """

    then: Then
    leave_out_hours: float = 0.0
    alert: bool = False
    advice: str = ""


RULES: dict[Reason, Rule] = {
    Reason.COMPLETED: Rule(Then.DONE),
    Reason.INTERRUPTED: Rule(Then.BUY_AGAIN, leave_out_hours=0.25),
    Reason.NODE_LOST: Rule(Then.BUY_AGAIN, leave_out_hours=0.25),
    Reason.SELF_ENDED: Rule(
        Then.RETRY,
        alert=True,
        advice="read the instance's console output: the node shut itself down before its agent could say why; "
        "see that the site's image has python3 with torch, boto3, obstore and pydantic, and that its role may read the "
        "store",
    ),
    Reason.STOPPED: Rule(Then.BUY_AGAIN),
    Reason.EXPIRED: Rule(Then.BUY_AGAIN, alert=True, advice="raise work_hours: the job took longer than planned"),
    Reason.FENCED: Rule(Then.BUY_AGAIN, advice="an older attempt was still alive; it has ended itself"),
    Reason.NO_CAPACITY: Rule(Then.ASK_AGAIN, leave_out_hours=0.25),
    Reason.PRICE_TOO_LOW: Rule(Then.ASK_AGAIN, leave_out_hours=0.25, advice="raise price_cap, or wait"),
    Reason.QUOTA: Rule(
        Then.ASK_AGAIN,
        leave_out_hours=24,
        alert=True,
        advice="ask the provider to raise the quota that the message names, or use other pools",
    ),
    Reason.THROTTLED: Rule(Then.ASK_AGAIN),
    Reason.CLOUD_ERROR: Rule(Then.ASK_AGAIN),
    Reason.NOT_AUTHORIZED: Rule(
        Then.FAIL, alert=True, advice="give the connection's identity the permission that the message names"
    ),
    Reason.BAD_REQUEST: Rule(
        Then.FAIL, alert=True, advice="correct the job's field or the site's setting that it names"
    ),
    Reason.BAD_PROGRAM: Rule(Then.RETRY, advice="read the end of the program's log"),
    Reason.OUT_OF_MEMORY: Rule(
        Then.RETRY, advice="reduce the batch, turn on gradient checkpointing, or ask for a GPU with more memory"
    ),
    Reason.DISK_FULL: Rule(
        Then.RETRY, alert=True, advice="give the site a larger volume (volume_gib), or let the program write less"
    ),
    Reason.HUNG: Rule(
        Then.RETRY,
        alert=True,
        advice="read the stacks at the end of the program's log; raise `hang` in the job if a step may take that long",
    ),
    Reason.CHECKPOINTS_TORN: Rule(
        Then.FAIL,
        alert=True,
        advice="bring back the objects that the message names, from versions or a backup of the bucket; or start anew "
        "as a job of another name: what was trained so far is then given up",
    ),
    Reason.STORE_UNREACHABLE: Rule(Then.RETRY, alert=True, advice="check the object store's address and credentials"),
    Reason.DEADLINE_IMPOSSIBLE: Rule(Then.FAIL, advice="move the deadline to the finish that the message names"),
    Reason.BUDGET_EXHAUSTED: Rule(Then.FAIL, alert=True, advice="raise the budget, or accept a later deadline"),
    Reason.CANCELLED: Rule(Then.FAIL),
}
"""Every reason has its row; a test holds it."""


def rule_for(reason: Reason) -> Rule:
    """What follows `reason`."""
    return RULES[reason]
