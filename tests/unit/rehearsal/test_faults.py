"""Faults: their rules, their chance, the catalogue, and what the gate makes of a request."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import botocore.session
import pytest
from botocore.parsers import create_parser
from pydantic import ValidationError

from gpucost.rehearsal.faults.control import FaultsControl
from gpucost.rehearsal.faults.credentials import Credentials
from gpucost.rehearsal.faults.injector import Injector
from gpucost.rehearsal.faults.rules import FaultRule, FaultSet, load_faults
from gpucost.rehearsal.protocol import catalogue
from gpucost.rehearsal.protocol.answers import error_response
from gpucost.rehearsal.protocol.reading import Call
from gpucost.rehearsal.protocol.wire import Ec2Error, answer

NOON = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
BUY = Call("ec2", "CreateFleet", "us-east-1", "AKIAONE")


class Pool(NamedTuple):
    zone: str
    instance_type: str


ZONE_A = Pool("us-east-1a", "g4dn.xlarge")
ZONE_B = Pool("us-east-1b", "g4dn.xlarge")


def rule(kind: str, **fields: Any) -> FaultRule:
    return FaultRule.model_validate({"kind": kind, **fields})


def outcomes(injector: Injector, call: Call, count: int) -> list[bool]:
    return [injector.decide(call).outcome is not None for _ in range(count)]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kind": "error"}, "code: got None, kind 'error' needs one"),
        ({"kind": "slow"}, "delay_real_s: got 0.0, kind 'slow' needs one"),
        ({"kind": "skew"}, "skew_s: got 0.0, kind 'skew' needs one"),
        ({"kind": "refuse"}, "code: got None"),
        ({"kind": "error", "code": "Throttling", "pool": "g4dn.*"}, "pool: got 'g4dn.*', but kind 'error' reads only"),
        ({"kind": "lost", "action": "PutEvents"}, "action: got 'PutEvents', but kind 'lost' reads only"),
        ({"kind": "error", "code": "Trottling"}, "code: 'Trottling' is not in the catalogue"),
        ({"kind": "error", "code": "RequestLimitExceeded", "service": "sqs"}, "sqs does not answer"),
        ({"kind": "refuse", "code": "Throttling"}, "expected what a pool answers: InsufficientInstanceCapacity"),
        ({"kind": "error", "code": "Throttling", "rate": 1.5}, "rate"),
        ({"kind": "error", "code": "Throttling", "rate": 0}, "rate"),
        ({"kind": "error", "code": "Throttling", "status": 200}, "status"),
        ({"kind": "eror"}, "kind"),
        ({"kind": "lost", "odds": 0.5}, "odds"),
    ],
)
def test_a_wrong_rule_is_refused_and_says_what_is_wrong(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match="(?s)" + said.replace("*", r"\*").replace("(", r"\(")):
        FaultRule.model_validate(fields)


def test_a_code_outside_the_catalogue_needs_a_message() -> None:
    odd = rule("error", code="HouseOnFire", message="Run.")
    assert catalogue.failure("HouseOnFire", odd.message) == catalogue.Failure("HouseOnFire", "Run.", 400)
    assert catalogue.failure("HouseOnFire", odd.message, 599).status == 599


NAMED_BY_THE_FACTS = [
    *("InsufficientInstanceCapacity", "SpotMaxPriceTooLow", "UnfulfillableCapacity"),
    *("MaxSpotInstanceCountExceeded", "VcpuLimitExceeded"),
    *("RequestLimitExceeded", "Throttling", "InternalError", "ServiceUnavailable"),
    *("InvalidInstanceID.NotFound", "UnauthorizedOperation", "AuthFailure", "ExpiredToken"),
]


def test_every_code_that_the_facts_name_is_in_the_catalogue_with_a_status_clients_understand() -> None:
    for code in NAMED_BY_THE_FACTS:
        known = catalogue.known(code)
        assert known is not None, code
        assert known.services <= catalogue.EVERY
        assert 400 <= known.status <= 599
    assert catalogue.failure("RequestLimitExceeded").status == 503
    assert catalogue.failure("UnauthorizedOperation").status == 403


def test_patterns_choose_service_action_region_and_caller() -> None:
    injector = Injector(rules=[rule("error", code="Throttling", service="ec2", action="Describe*", access_key="AKIA*")])
    calls = {
        Call("ec2", "DescribeInstances", "us-east-1", "AKIAONE"): True,
        Call("ec2", "CreateFleet", "us-east-1", "AKIAONE"): False,
        Call("sqs", "DescribeInstances", "us-east-1", "AKIAONE"): False,
        Call("ec2", "DescribeInstances", "us-east-1", "ASIAONE"): False,
    }
    assert {call: injector.decide(call).outcome is not None for call in calls} == calls


def test_skip_and_times_count_matches() -> None:
    injector = Injector(rules=[rule("error", code="Throttling", action="CreateFleet", skip=2, times=3)])
    injector.decide(Call("ec2", "DescribeInstances"))
    assert outcomes(injector, BUY, 7) == [False, False, True, True, True, False, False]
    (shown,) = injector.as_json()
    assert (shown["matched"], shown["fired"]) == (7, 3)


def test_the_rate_is_met_and_the_same_seed_gives_the_same_faults() -> None:
    some = [rule("error", id="t", code="Throttling", rate=0.3)]
    first, again = outcomes(Injector(7, some), BUY, 2000), outcomes(Injector(7, some), BUY, 2000)
    assert first == again
    # four standard deviations of 2000 draws at 0.3
    assert abs(sum(first) - 600) < 82
    assert outcomes(Injector(8, some), BUY, 2000) != first


def test_another_rule_does_not_change_when_a_rule_fires() -> None:
    alone = Injector(7, [rule("error", id="t", code="Throttling", rate=0.3)])
    beside = Injector(
        7,
        [rule("slow", id="s", delay_real_s=1, rate=0.5), rule("error", id="t", code="Throttling", rate=0.3)],
    )
    assert outcomes(alone, BUY, 100) == outcomes(beside, BUY, 100)


def test_the_first_rule_that_fires_decides_and_delays_add_up() -> None:
    injector = Injector(
        rules=[
            rule("slow", delay_real_s=0.5),
            rule("error", code="Throttling", times=1),
            rule("timeout", delay_real_s=9),
            rule("slow", delay_real_s=0.25),
        ]
    )
    first, second = injector.decide(BUY), injector.decide(BUY)
    assert first.outcome is not None
    assert second.outcome is not None
    assert (first.outcome.kind, second.outcome.kind) == ("error", "timeout")
    assert first.delay_real_s == 0.75


def test_ids_are_made_and_a_taken_one_is_refused() -> None:
    injector = Injector(rules=[rule("lost"), rule("lost", id="fault-2"), rule("doubled")])
    assert [shown["id"] for shown in injector.as_json()] == ["fault-1", "fault-2", "fault-3"]
    with pytest.raises(ValueError, match=r"rules\.0\.id: 'fault-2' is taken"):
        injector.add([rule("lost", id="fault-2")])
    with pytest.raises(ValidationError, match=r"rules\.1\.id: 'a' is taken"):
        FaultSet(rules=[rule("lost", id="a"), rule("lost", id="a")])
    assert (injector.clear("fault-2"), injector.clear("fault-2"), injector.clear()) == (1, 0, 2)
    assert injector.as_json() == []


def test_pools_are_refused_by_pattern_and_lifecycle() -> None:
    injector = Injector(
        rules=[rule("refuse", code="InsufficientInstanceCapacity", pool="*@us-east-1a", lifecycle="spot")]
    )
    refused = injector.refusal(ZONE_A, "spot")  # type: ignore[arg-type]  # the two fields that it reads
    assert refused is not None
    assert refused[0] == "InsufficientInstanceCapacity"
    assert injector.refusal(ZONE_A, "on-demand") is None  # type: ignore[arg-type]
    assert injector.refusal(ZONE_B, "spot") is None  # type: ignore[arg-type]
    assert injector.decide(BUY).outcome is None


def test_messages_are_lost_and_doubled() -> None:
    injector = Injector(rules=[rule("lost", times=1), rule("doubled", times=2)])
    assert [injector.copies() for _ in range(4)] == [0, 2, 2, 1]


def test_skew_is_for_whom_it_matches() -> None:
    injector = Injector(rules=[rule("skew", skew_s=-30, service="imds", action="i-0a/*")])
    assert injector.imds_skew("i-0a") == -30
    assert injector.imds_skew("i-0b") == 0
    assert injector.skew(BUY) == 0


def test_a_faults_file_is_read_and_a_wrong_one_names_itself(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text('{"rules": [{"kind": "error", "code": "Throttling", "rate": 0.1}]}')
    assert [one.code for one in load_faults(path)] == ["Throttling"]
    path.write_text('{"rules": [{"kind": "error"}]}')
    with pytest.raises(ValueError, match=r"(?s)faults: .*faults\.json.*code: got None"):
        load_faults(path)
    with pytest.raises(ValueError, match="cannot read"):
        load_faults(tmp_path / "none.json")


@pytest.mark.parametrize(("service", "as_json"), [("ec2", False), ("sts", False), ("sqs", True), ("events", True)])
def test_botocore_reads_the_code_message_and_status_of_every_services_errors(service: str, as_json: bool) -> None:
    model = botocore.session.Session().get_service_model(service)
    parser = create_parser(model.resolved_protocol)
    failure = catalogue.Failure("Odd.Code", "less < than & more", 503)
    answer = error_response(service, failure, as_json=as_json)
    headers = {name.lower(): value for name, value in answer.headers.items()}
    parsed = parser.parse({"status_code": answer.status_code, "headers": headers, "body": answer.get_data()}, None)
    assert parsed["Error"]["Code"] == "Odd.Code"
    assert parsed["Error"]["Message"] == "less < than & more"
    assert parsed["ResponseMetadata"]["HTTPStatusCode"] == 503


@pytest.mark.parametrize("code", catalogue.codes())
def test_an_error_has_one_status_whoever_answers_it(code: str) -> None:
    failure = catalogue.failure(code)
    assert answer("CreateFleet", Ec2Error(code, "said"))[0] == failure.status
    assert error_response("ec2", failure, as_json=False).status_code == failure.status


def test_rules_and_their_counts_outlive_the_cloud(tmp_path: Path) -> None:
    kept_in = tmp_path / "faults.json"
    given = [rule("error", code="Throttling", times=3), rule("error", id="t", code="Unavailable", rate=0.3)]
    whole = outcomes(Injector(7, given), BUY, 60)
    first = Injector(7, given, kept_in)
    lived = outcomes(first, BUY, 20)
    first.add([rule("lost", id="by hand")])
    second = Injector(7, given, kept_in)
    assert second.as_json() == first.as_json()
    assert lived + outcomes(second, BUY, 40) == whole, "what chance held for the rules goes on where it was"
    assert kept_in.stat().st_mode & 0o777 == 0o600
    second.clear("t")
    changed = rule("lost", id="by hand", times=1)
    third = Injector(7, [changed], kept_in)
    assert [(shown["id"], shown.get("times")) for shown in third.as_json()] == [("fault-1", 3), ("by hand", 1)]


@pytest.mark.parametrize("content", ["{", '{"rules": [{"id": "a"}], "deny": 5}'])
def test_a_damaged_file_says_what_to_do(tmp_path: Path, content: str) -> None:
    path = tmp_path / "kept.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"kept\.json cannot be read: .*remove it"):
        Injector(kept_in=path)
    with pytest.raises(ValueError, match=r"(?s)kept\.json cannot be read: .*remove it"):
        Credentials("123456789012", kept_in=path)


def endpoint(control: FaultsControl, name: str) -> Callable[[dict[str, Any]], tuple[int, Any]]:
    return lambda body: control.routes()["POST", name](json.dumps(body).encode())


def test_the_control_adds_shows_and_clears_rules() -> None:
    injector = Injector()
    control = FaultsControl(injector, Credentials("123456789012", lambda: NOON))
    add, clear = endpoint(control, "faults"), endpoint(control, "faults/clear")
    assert add({"rules": [{"id": "a", "kind": "lost"}]})[0] == 200
    status, answer = add({"rules": [{"id": "a", "kind": "lost"}]})
    assert (status, "taken" in answer["error"]) == (409, True)
    assert clear({"id": "b"})[0] == 404
    assert clear({})[1]["cleared"] == 1
    assert Counter(shown["id"] for shown in control.rules()) == {}
    with pytest.raises(ValidationError, match="action"):
        endpoint(control, "credentials")({"deny": [{"action": "CreateFleet"}]})
