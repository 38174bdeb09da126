"""Every reason has its row, and what cannot be helped by trying again is not tried again."""

from __future__ import annotations

import pytest

from gpucost.lifecycle.steps import CourseEnded
from gpucost.reasons import RULES, Reason, Then, rule_for


def test_every_reason_has_its_row() -> None:
    assert set(RULES) == set(Reason)


@pytest.mark.parametrize("reason", [Reason.NOT_AUTHORIZED, Reason.BAD_REQUEST])
def test_what_only_a_person_can_mend_fails_at_once_alerts_and_says_what_to_do(reason: Reason) -> None:
    rule = rule_for(reason)
    assert (rule.then, rule.alert) == (Then.FAIL, True)
    assert rule.advice


def test_a_quota_leaves_its_pools_out_for_long_alerts_and_says_what_to_do() -> None:
    rule = rule_for(Reason.QUOTA)
    assert (rule.then, rule.alert) == (Then.ASK_AGAIN, True)
    assert rule.leave_out_hours == max(other.leave_out_hours for other in RULES.values())
    assert "quota" in rule.advice


@pytest.mark.parametrize(
    "reason", [Reason.INTERRUPTED, Reason.NODE_LOST, Reason.STOPPED, Reason.EXPIRED, Reason.FENCED]
)
def test_losing_a_machine_is_no_failure(reason: Reason) -> None:
    assert rule_for(reason).then is Then.BUY_AGAIN


@pytest.mark.parametrize("reason", [Reason.NO_CAPACITY, Reason.PRICE_TOO_LOW, Reason.THROTTLED, Reason.CLOUD_ERROR])
def test_a_cloud_that_cannot_serve_now_is_asked_again(reason: Reason) -> None:
    assert rule_for(reason).then is Then.ASK_AGAIN


@pytest.mark.parametrize(
    "reason", [Reason.BAD_PROGRAM, Reason.OUT_OF_MEMORY, Reason.STORE_UNREACHABLE, Reason.SELF_ENDED]
)
def test_a_failure_of_the_program_is_for_airflow_s_retries(reason: Reason) -> None:
    rule = rule_for(reason)
    assert rule.then is Then.RETRY
    assert rule.advice


@pytest.mark.parametrize("reason", [Reason.NO_CAPACITY, Reason.PRICE_TOO_LOW, Reason.INTERRUPTED, Reason.NODE_LOST])
def test_a_pool_that_just_failed_us_is_left_out_for_a_while(reason: Reason) -> None:
    assert rule_for(reason).leave_out_hours > 0


def test_our_own_stop_leaves_no_pool_out() -> None:
    assert rule_for(Reason.STOPPED).leave_out_hours == 0


@pytest.mark.parametrize("reason", Reason)
def test_whoever_reads_the_failure_learns_the_reason_and_what_to_do(reason: Reason) -> None:
    message = str(CourseEnded(reason, "VcpuLimitExceeded: 0 vCPU of G instances"))
    assert message.startswith(f"{reason}: VcpuLimitExceeded: 0 vCPU of G instances")
    assert rule_for(reason).advice in message
