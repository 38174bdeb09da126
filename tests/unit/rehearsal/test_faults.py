"""Faults: their rules, their chance, the catalogue, and what the gate makes of a request."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import botocore.session
import pytest
from botocore.parsers import create_parser
from pydantic import ValidationError
from werkzeug.test import Client, EnvironBuilder
from werkzeug.wrappers import Response

from gpucost.rehearsal.faults.control import FaultsControl
from gpucost.rehearsal.faults.credentials import MOTO_EXAMPLE_KEY, Credentials, CredentialsChange
from gpucost.rehearsal.faults.gate import Gate
from gpucost.rehearsal.faults.injector import Injector
from gpucost.rehearsal.faults.rules import FaultRule, FaultSet, load_faults
from gpucost.rehearsal.protocol import catalogue
from gpucost.rehearsal.protocol.answers import error_response
from gpucost.rehearsal.protocol.reading import Call, read
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


class Wire:
    """A gate before a small application; tells what was done, and how long somebody waited."""

    def __init__(self, *rules: FaultRule) -> None:
        self.done: list[str] = []
        self.waited: list[float] = []
        self.now = NOON
        self.body = "<ok/>"
        self.injector = Injector(rules=rules)
        self.credentials = Credentials("123456789012", lambda: self.now)
        self.gate = Gate(self.injector, self.credentials, region="us-east-1", pause=self.waited.append)

    def app(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        self.done.append(environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)).decode())
        return Response(self.body, content_type="text/xml")(environ, start_response)

    def ask(self, service: str = "ec2", action: str = "CreateFleet", key: str = "AKIAONE", **more: str) -> Any:
        headers = {"X-Amz-Date": self.now.strftime("%Y%m%dT%H%M%SZ"), **more}
        if key:
            scope = f"{key}/20261130/us-east-1/{service}/aws4_request"
            headers["Authorization"] = f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=00"
        if service in {"sqs", "events"}:
            headers["X-Amz-Target"] = f"AmazonSQS.{action}"
            return self.client.post("/", data="{}", headers=headers)
        return self.client.post("/", data={"Action": action, "Version": "2016-11-15"}, headers=headers)

    @property
    def client(self) -> Client:
        return Client(lambda environ, start_response: self.gate.serve(environ, start_response, self.app))

    def refused(self, *args: str, **more: str) -> str:
        """The code of the error that comes back, which must have been answered without any work."""
        before = len(self.done)
        answer = self.ask(*args, **more)
        assert answer.status_code >= 400, answer.text
        assert len(self.done) == before
        if "__type" in answer.text:
            return str(json.loads(answer.text)["__type"])
        return str(answer.text.partition("<Code>")[2].partition("</Code>")[0])


def test_without_faults_the_application_gets_the_whole_request() -> None:
    wire = Wire()
    assert wire.ask().text == "<ok/>"
    assert wire.done == ["Action=CreateFleet&Version=2016-11-15"]


def test_errors_come_before_or_after_the_work() -> None:
    before, after = Wire(rule("error", code="RequestLimitExceeded")), Wire(rule("error-after", code="InternalError"))
    assert (before.ask().status_code, before.done) == (503, [])
    answer = after.ask()
    assert (answer.status_code, len(after.done)) == (500, 1)
    assert "<Code>InternalError</Code>" in answer.text


@pytest.mark.parametrize(("kind", "work"), [("timeout", 0), ("timeout-after", 1)])
def test_a_timeout_holds_and_never_answers(kind: str, work: int) -> None:
    wire = Wire(rule(kind, delay_real_s=5))
    with pytest.raises(ConnectionAbortedError):
        wire.ask()
    assert (len(wire.done), wire.waited) == (work, [5])


def test_a_slow_answer_is_the_right_one() -> None:
    wire = Wire(rule("slow", delay_real_s=2, times=1))
    assert wire.ask().text == "<ok/>"
    assert wire.waited == [2]
    wire.ask()
    assert wire.waited == [2]


def test_imds_is_faulted_by_instance_and_needs_no_signature() -> None:
    wire = Wire(rule("error", code="ServiceUnavailable", service="imds", action="i-0a/*"))
    assert wire.client.get("/imds/i-0a/latest/meta-data/instance-id").status_code == 503
    assert wire.client.get("/imds/i-0b/latest/meta-data/instance-id").text == "<ok/>"


@pytest.mark.parametrize(
    ("make", "codes"),
    [
        (
            CredentialsChange(disable=["AKIA*"]),
            ("AuthFailure", "InvalidClientTokenId", "InvalidClientTokenId", "UnrecognizedClientException"),
        ),
        (
            CredentialsChange.model_validate({"deny": [{"action": "*:*"}]}),
            ("UnauthorizedOperation", "AccessDenied", "AccessDenied", "AccessDeniedException"),
        ),
        (
            CredentialsChange(expire=["AKIAONE"]),
            ("RequestExpired", "ExpiredToken", "ExpiredToken", "ExpiredTokenException"),
        ),
    ],
)
def test_each_service_refuses_callers_in_its_own_words(make: CredentialsChange, codes: tuple[str, ...]) -> None:
    wire = Wire()
    wire.credentials.change(make)
    assert tuple(wire.refused(service) for service in ("ec2", "sts", "sqs", "events")) == codes
    wire.credentials.change(CredentialsChange(clear=True))
    assert wire.ask().status_code == 200


def test_a_permission_is_taken_from_one_caller_and_one_action() -> None:
    wire = Wire()
    wire.credentials.change(
        CredentialsChange.model_validate({"deny": [{"access_key": "AKIAONE", "action": "ec2:Create*"}]})
    )
    answer = wire.ask()
    assert "You are not authorized to perform this operation." in answer.text
    assert "is not authorized to perform: ec2:CreateFleet" in answer.text
    assert wire.ask(action="DescribeInstances").status_code == 200
    assert wire.ask(key="AKIATWO").status_code == 200


def test_unsigned_requests_are_refused_by_ec2_only() -> None:
    wire = Wire()
    assert wire.refused(key="") == "MissingAuthenticationToken"
    assert wire.ask(action="AssumeRoleWithWebIdentity", key="").status_code == 200
    assert wire.client.get("/moto-api/").status_code == 200


ISSUED = "<Credentials><AccessKeyId>{}</AccessKeyId><Expiration>2026-11-30T12:15:00Z</Expiration></Credentials>"


def test_issued_credentials_expire_in_real_time() -> None:
    wire = Wire()
    wire.body = ISSUED.format("ASIATEMP")
    wire.ask("sts", "AssumeRole")
    wire.now = NOON + timedelta(minutes=14)
    assert wire.ask(key="ASIATEMP").status_code == 200
    wire.now = NOON + timedelta(minutes=15)
    assert wire.refused(key="ASIATEMP") == "RequestExpired"
    assert wire.refused("sqs", "ReceiveMessage", "ASIATEMP") == "ExpiredToken"
    assert wire.ask(key="AKIAONE").status_code == 200


def test_issued_credentials_can_be_ended_early_but_only_those_that_were_issued() -> None:
    wire = Wire()
    wire.body = ISSUED.format("ASIATEMP")
    wire.ask("sts", "AssumeRole")
    with pytest.raises(ValueError, match="expire: got 'AKIA"):
        wire.credentials.change(CredentialsChange(expire=["AKIA*"]))
    wire.credentials.change(CredentialsChange(expire=["ASIA*"]))
    assert wire.refused(key="ASIATEMP") == "RequestExpired"


def test_every_session_token_gets_a_key_of_its_own() -> None:
    wire = Wire()
    wire.body = ISSUED.format(MOTO_EXAMPLE_KEY)
    keys = {wire.ask("sts", "GetSessionToken").text.partition("<AccessKeyId>")[2][:20] for _ in range(3)}
    assert len(keys) == 3
    assert all(key.startswith("ASIA") for key in keys)
    assert set(wire.credentials.as_json()["issued"]) == keys


@pytest.mark.parametrize("minutes", [-16, 16])
def test_a_request_15_minutes_off_the_clouds_clock_is_refused(minutes: int) -> None:
    wire = Wire()
    off = {"X-Amz-Date": (NOON + timedelta(minutes=minutes)).strftime("%Y%m%dT%H%M%SZ")}
    assert wire.refused(**off) == "RequestExpired"
    assert wire.refused("sts", "GetCallerIdentity", **off) == "SignatureDoesNotMatch"
    assert wire.refused("events", "PutEvents", **off) == "InvalidSignatureException"
    near = {"X-Amz-Date": (NOON + timedelta(minutes=minutes // 2)).strftime("%Y%m%dT%H%M%SZ")}
    assert wire.ask(**near).status_code == 200


def test_a_skewed_cloud_refuses_good_signatures_of_those_it_is_skewed_for() -> None:
    wire = Wire(rule("skew", skew_s=3600, access_key="AKIAONE"))
    assert wire.refused() == "RequestExpired"
    assert wire.ask(key="AKIATWO").status_code == 200


def test_presigned_requests_are_read_from_their_query() -> None:
    query = {"Action": "GetCallerIdentity", "X-Amz-Credential": "AKIAONE/20261130/eu-west-1/sts/aws4_request"}
    asked = read(EnvironBuilder("/", query_string=query).get_environ(), "us-east-1")
    assert asked.call == Call("sts", "GetCallerIdentity", "eu-west-1", "AKIAONE")


def test_parameters_are_read_once_from_the_body_or_from_the_address() -> None:
    form = {"Action": "DescribeInstances", "InstanceId.1": "i-0a", "Empty": ""}
    in_body = EnvironBuilder("/", method="POST", data=form).get_environ()
    in_address = EnvironBuilder("/", query_string=form).get_environ()
    for environ in (in_body, in_address):
        asked = read(environ, "eu-west-1")
        assert (asked.call, asked.form) == (Call("ec2", "DescribeInstances", "eu-west-1"), form)
        assert read(environ, "another") is asked
    assert in_body["wsgi.input"].read() == b"Action=DescribeInstances&InstanceId.1=i-0a&Empty="


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


def test_what_was_taken_from_callers_outlives_the_cloud(tmp_path: Path) -> None:
    kept_in = tmp_path / "credentials.json"
    wire = Wire()
    wire.credentials = Credentials("123456789012", lambda: wire.now, kept_in)
    wire.gate = Gate(wire.injector, wire.credentials, region="us-east-1")
    wire.body = ISSUED.format("ASIATEMP")
    wire.ask("sts", "AssumeRole")
    wire.credentials.change(
        CredentialsChange.model_validate(
            {"deny": [{"action": "ec2:CreateFleet"}], "disable": ["AKIAGONE"], "expire": ["AKIAOLD"]}
        )
    )
    again = Credentials("123456789012", lambda: wire.now, kept_in)
    assert again.as_json() == wire.credentials.as_json()
    wire.gate = Gate(wire.injector, again, region="us-east-1")
    assert wire.refused() == "UnauthorizedOperation"
    assert wire.refused(action="DescribeInstances", key="AKIAGONE") == "AuthFailure"
    assert wire.refused(action="DescribeInstances", key="AKIAOLD") == "RequestExpired"
    wire.now += timedelta(minutes=15)
    assert wire.refused(action="DescribeInstances", key="ASIATEMP") == "RequestExpired"
    assert kept_in.stat().st_mode & 0o777 == 0o600


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
