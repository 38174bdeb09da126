"""What callers meet at the gate: faults on the way, and who may pass."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from werkzeug.test import Client, EnvironBuilder
from werkzeug.wrappers import Response

from gpucost.rehearsal.faults.credentials import MOTO_EXAMPLE_KEY, Credentials, CredentialsChange
from gpucost.rehearsal.faults.gate import Gate
from gpucost.rehearsal.faults.injector import Injector
from gpucost.rehearsal.faults.rules import FaultRule
from gpucost.rehearsal.protocol.reading import Call, read

NOON = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
BUY = Call("ec2", "CreateFleet", "us-east-1", "AKIAONE")


def rule(kind: str, **fields: Any) -> FaultRule:
    return FaultRule.model_validate({"kind": kind, **fields})


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
