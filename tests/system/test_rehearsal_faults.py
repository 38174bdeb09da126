"""Everything that can go wrong in the cloud, as a plain boto3 client meets it."""

from __future__ import annotations

import json
import signal
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from http.client import RemoteDisconnected
from pathlib import Path
from typing import Any

import pytest
from botocore import UNSIGNED
from botocore.exceptions import ClientError, ConnectionClosedError, ReadTimeoutError

from tests.system.rehearsal import SLEEPER, TYPE, ZONES, Cloud, launch, wait_for

KEY = "AKIAREHEARSAL"


def at_start() -> dict[str, Any]:
    return {"rules": [{"id": "file", "kind": "error", "code": "Unavailable", "access_key": "AKIAFROMFILE"}]}


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    folder = tmp_path_factory.mktemp("faults")
    faults = folder / "faults.json"
    faults.write_text(json.dumps(at_start()))
    running = launch(folder / "state", "--faults", str(faults), "--seed", "5")
    yield running
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(timeout=30) == 0


@pytest.fixture(scope="module")
def template(cloud: Cloud) -> str:
    return cloud.template(SLEEPER)


@pytest.fixture(autouse=True)
def _no_leftovers(cloud: Cloud) -> Iterator[None]:
    cloud.post("faults/clear", {})
    cloud.post("faults", at_start())
    yield
    cloud.post("faults/clear", {})
    cloud.post("credentials", {"clear": True})
    living = [one["instance_id"] for one in cloud.get("status")["instances"] if one["state"] in {"pending", "running"}]
    if living:
        cloud.ec2.terminate_instances(InstanceIds=living)


def client(
    cloud: Cloud, service: str = "ec2", key: str = KEY, token: str | None = None, attempts: int = 1, **config: Any
) -> Any:
    """A client that asks once: botocore's own retries would hide the faults."""
    return cloud.client(service, key=key, token=token, retries={"total_max_attempts": attempts}, **config)


def fault(cloud: Cloud, kind: str, **fields: Any) -> str:
    """Add one rule; its id."""
    return str(cloud.post("faults", {"rules": [{"kind": kind, **fields}]})["added"][0])


def fired(cloud: Cloud, rule_id: str) -> int:
    return next(int(rule["fired"]) for rule in cloud.get("status")["faults"] if rule["id"] == rule_id)


def code_of(call: Callable[[], Any]) -> tuple[str, int]:
    with pytest.raises(ClientError) as caught:
        call()
    return caught.value.response["Error"]["Code"], caught.value.response["ResponseMetadata"]["HTTPStatusCode"]


def buy(ec2: Any, template: str, token: str, **more: Any) -> Any:
    return ec2.create_fleet(
        Type="instant",
        ClientToken=token,
        LaunchTemplateConfigs=[
            {
                "LaunchTemplateSpecification": {"LaunchTemplateId": template, "Version": "$Latest"},
                "Overrides": [{"InstanceType": TYPE, "AvailabilityZone": zone} for zone in ZONES],
            }
        ],
        TargetCapacitySpecification={"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"},
        **more,
    )


def machines(cloud: Cloud) -> set[str]:
    """Every instance there ever was, by the rehearsal's own word."""
    return {one["instance_id"] for one in cloud.get("status")["instances"]}


def ids_of(answer: Any) -> set[str]:
    return {one for group in answer["Instances"] for one in group["InstanceIds"]}


def test_throttling_comes_at_its_rate(cloud: Cloud) -> None:
    rule = fault(cloud, "error", code="RequestLimitExceeded", action="Describe*", rate=0.5)
    once = client(cloud)
    seen: Counter[tuple[str, int]] = Counter()
    for _ in range(40):
        try:
            once.describe_fleets()
        except ClientError as error:
            seen[error.response["Error"]["Code"], error.response["ResponseMetadata"]["HTTPStatusCode"]] += 1
    throttled = seen["RequestLimitExceeded", 503]
    assert set(seen) == {("RequestLimitExceeded", 503)}
    # five standard deviations of 40 draws at a half
    assert 4 <= throttled <= 36
    assert fired(cloud, rule) == throttled
    cloud.post("faults/clear", {"id": rule})
    once.describe_fleets()


def test_botocore_takes_a_throttled_answer_for_one_to_ask_again(cloud: Cloud) -> None:
    rule = fault(cloud, "error", code="RequestLimitExceeded", action="DescribeFleets", times=1)
    client(cloud, attempts=3).describe_fleets()
    assert fired(cloud, rule) == 1


@pytest.mark.parametrize(
    ("service", "code", "status", "call"),
    [
        ("ec2", "InternalError", 500, lambda it: it.describe_regions()),
        ("sts", "Throttling", 400, lambda it: it.get_caller_identity()),
        ("sqs", "RequestThrottled", 403, lambda it: it.list_queues()),
        ("sqs", "ServiceUnavailable", 503, lambda it: it.list_queues()),
        ("events", "ThrottlingException", 400, lambda it: it.list_rules()),
    ],
)
def test_every_service_answers_errors_in_its_own_protocol(
    cloud: Cloud, service: str, code: str, status: int, call: Callable[[Any], Any]
) -> None:
    asking = client(cloud, service)
    call(asking)
    fault(cloud, "error", service=service, code=code)
    assert code_of(lambda: call(asking)) == (code, status)


def test_an_error_can_come_after_the_work_was_done(cloud: Cloud, template: str) -> None:
    before = machines(cloud)
    fault(cloud, "error-after", code="InternalError", action="CreateFleet", times=1)
    once = client(cloud)
    assert code_of(lambda: buy(once, template, "after")) == ("InternalError", 500)
    made = machines(cloud) - before
    assert len(made) == 1
    assert ids_of(buy(once, template, "after")) == made


def test_a_timeout_without_work_leaves_nothing(cloud: Cloud, template: str) -> None:
    before = machines(cloud)
    fault(cloud, "timeout", action="CreateFleet", delay_real_s=0.2, times=1)
    with pytest.raises(ConnectionClosedError):
        buy(client(cloud), template, "never")
    assert machines(cloud) == before


def test_a_timeout_after_the_work_is_answered_with_the_same_fleet_later(cloud: Cloud, template: str) -> None:
    before = machines(cloud)
    fault(cloud, "timeout-after", action="CreateFleet", delay_real_s=3, times=1)
    impatient = client(cloud, read_timeout=0.5)
    with pytest.raises(ReadTimeoutError):
        buy(impatient, template, "unknown")
    made = machines(cloud) - before
    assert len(made) == 1
    again, and_again = buy(impatient, template, "unknown"), buy(impatient, template, "unknown")
    assert again["FleetId"] == and_again["FleetId"]
    assert ids_of(again) == made
    assert machines(cloud) - before == made


def test_slow_answers_are_right_but_late(cloud: Cloud) -> None:
    fault(cloud, "slow", action="DescribeRegions", delay_real_s=0.6, times=2)
    began = time.monotonic()
    assert client(cloud).describe_regions()["Regions"]
    assert time.monotonic() - began >= 0.6
    with pytest.raises(ReadTimeoutError):
        client(cloud, read_timeout=0.2).describe_regions()


def test_pools_can_be_refused(cloud: Cloud, template: str) -> None:
    fault(cloud, "refuse", code="InsufficientInstanceCapacity", pool=f"{TYPE}@us-east-1[ab]", lifecycle="spot")
    fault(cloud, "refuse", code="MaxSpotInstanceCountExceeded", pool="*@us-east-1c", lifecycle="spot")
    answer = buy(client(cloud), template, "refused")
    codes = [
        (e["LaunchTemplateAndOverrides"]["Overrides"]["AvailabilityZone"], e["ErrorCode"]) for e in answer["Errors"]
    ]
    assert sorted(codes) == [
        ("us-east-1a", "InsufficientInstanceCapacity"),
        ("us-east-1b", "InsufficientInstanceCapacity"),
        ("us-east-1c", "MaxSpotInstanceCountExceeded"),
    ]
    assert answer["Instances"] == []


def test_a_permission_taken_away_stops_the_call_and_its_dry_run(cloud: Cloud, template: str) -> None:
    cloud.post("credentials", {"deny": [{"action": "ec2:CreateFleet"}]})
    for more in ({}, {"DryRun": True}):
        with pytest.raises(ClientError, match="You are not authorized to perform this operation") as caught:
            buy(client(cloud), template, "denied", **more)
        assert caught.value.response["Error"]["Code"] == "UnauthorizedOperation"
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403
    client(cloud).describe_fleets()
    cloud.post("credentials", {"clear": True})
    assert code_of(lambda: buy(client(cloud), template, "denied", DryRun=True))[0] == "DryRunOperation"


def test_a_disabled_key_is_unknown_to_every_service(cloud: Cloud) -> None:
    cloud.post("credentials", {"disable": ["AKIAGONE"]})
    codes = {
        "ec2": code_of(lambda: client(cloud, key="AKIAGONE").describe_regions()),
        "sts": code_of(lambda: client(cloud, "sts", key="AKIAGONE").get_caller_identity()),
        "sqs": code_of(lambda: client(cloud, "sqs", key="AKIAGONE").list_queues()),
        "events": code_of(lambda: client(cloud, "events", key="AKIAGONE").list_rules()),
    }
    assert codes == {
        "ec2": ("AuthFailure", 401),
        "sts": ("InvalidClientTokenId", 403),
        "sqs": ("InvalidClientTokenId", 403),
        "events": ("UnrecognizedClientException", 403),
    }
    client(cloud).describe_regions()


def test_unsigned_requests_are_refused(cloud: Cloud) -> None:
    nobody = client(cloud, signature_version=UNSIGNED)
    assert code_of(lambda: nobody.describe_instances()) == ("MissingAuthenticationToken", 403)


def test_session_credentials_expire(cloud: Cloud) -> None:
    # AWS lends for 900 s at least; a client that does not check lets the test be quick
    sts = client(cloud, "sts", parameter_validation=False)
    role = {"RoleArn": "arn:aws:iam::123456789012:role/gpucost", "RoleSessionName": "test"}
    short = sts.assume_role(**role, DurationSeconds=2)["Credentials"]
    long = sts.assume_role(**role)["Credentials"]
    for_short, for_long = (client(cloud, key=one["AccessKeyId"], token=one["SessionToken"]) for one in (short, long))
    for_short.describe_regions()
    time.sleep(max(0.0, (short["Expiration"] - datetime.now(UTC)).total_seconds()) + 0.1)
    assert code_of(lambda: for_short.describe_regions()) == ("RequestExpired", 400)
    queues = client(cloud, "sqs", key=short["AccessKeyId"], token=short["SessionToken"])
    assert code_of(lambda: queues.list_queues()) == ("ExpiredToken", 403)
    for_long.describe_regions()
    cloud.post("credentials", {"expire": [long["AccessKeyId"]]})
    assert code_of(lambda: for_long.describe_regions()) == ("RequestExpired", 400)


def imds_token(cloud: Cloud, instance_id: str) -> str:
    request = urllib.request.Request(  # noqa: S310
        f"{cloud.url}/imds/{instance_id}/latest/api/token",
        method="PUT",
        headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"},
    )
    with urllib.request.urlopen(request, timeout=5) as response:  # noqa: S310
        return str(response.read().decode())


def test_metadata_can_be_away_for_one_instance(cloud: Cloud, template: str) -> None:
    ill, well = cloud.one(template), cloud.one(template)
    fault(cloud, "timeout", service="imds", action=f"{ill}/*", delay_real_s=0.1)
    with pytest.raises(RemoteDisconnected):
        imds_token(cloud, ill)
    assert imds_token(cloud, well)
    cloud.post("faults/clear", {})
    fault(cloud, "error", service="imds", action=f"{ill}/*", code="ServiceUnavailable")
    with pytest.raises(urllib.error.HTTPError) as caught:
        imds_token(cloud, ill)
    assert caught.value.code == 503


def action_time(cloud: Cloud, instance_id: str) -> datetime:
    """When the instance's metadata says it will be terminated."""
    request = urllib.request.Request(  # noqa: S310
        f"{cloud.url}/imds/{instance_id}/latest/meta-data/spot/instance-action",
        headers={"X-aws-ec2-metadata-token": imds_token(cloud, instance_id)},
    )
    with urllib.request.urlopen(request, timeout=5) as response:  # noqa: S310
        return datetime.fromisoformat(json.load(response)["time"])


def test_metadata_of_one_instance_can_tell_wrong_times(cloud: Cloud, template: str) -> None:
    noticed = cloud.one(template)
    cloud.wait_state(noticed, "running")
    # a notice is what happens when nothing else is said
    cloud.post("interrupt", {"instance_id": noticed})
    right = action_time(cloud, noticed)
    fault(cloud, "skew", service="imds", action=f"{noticed}/*", skew_s=-90)
    assert right - action_time(cloud, noticed) == timedelta(seconds=90)


def test_interruption_warnings_are_lost_or_come_twice(cloud: Cloud, template: str) -> None:
    sqs, events = client(cloud, "sqs"), client(cloud, "events")
    queue = sqs.create_queue(QueueName="warnings")["QueueUrl"]
    arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
    pattern = {"source": ["aws.ec2"], "detail-type": ["EC2 Spot Instance Interruption Warning"]}
    events.put_rule(Name="warnings", EventPattern=json.dumps(pattern))
    events.put_targets(Rule="warnings", Targets=[{"Id": "queue", "Arn": arn}])
    ids = [cloud.one(template) for _ in range(3)]
    for one in ids:
        cloud.wait_state(one, "running")
    # events that meet no rule, as those of new states, bring no message: no fault is spent on them
    fault(cloud, "lost", times=1)
    fault(cloud, "doubled", times=1)
    living = cloud.one(template)
    cloud.wait_state(living, "running")
    for one in ids:
        cloud.post("interrupt", {"instance_id": one, "event": "notice"})
    lost, doubled, plain = ids
    got: list[dict[str, Any]] = []

    def all_there() -> bool:
        answer = sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10, WaitTimeSeconds=1)
        got.extend(json.loads(message["Body"]) for message in answer.get("Messages", []))
        return len(got) >= 3

    wait_for("three warnings", all_there, 8)
    about = Counter(event["detail"]["instance-id"] for event in got)
    assert about == {doubled: 2, plain: 1}
    # what is sent twice is one event: its id is what receivers tell copies by
    assert len({event["id"] for event in got}) == 2
    assert lost not in about


def test_messages_that_are_sent_directly_are_lost_or_come_twice(cloud: Cloud) -> None:
    sqs = client(cloud, "sqs")
    queue = sqs.create_queue(QueueName="direct")["QueueUrl"]
    fault(cloud, "lost", times=1)
    fault(cloud, "doubled", times=1)
    ids = {text: sqs.send_message(QueueUrl=queue, MessageBody=text)["MessageId"] for text in ("lost", "twice", "once")}
    got = [
        message
        for _ in range(5)
        for message in sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10).get("Messages", [])
    ]
    assert Counter(message["Body"] for message in got) == {"twice": 2, "once": 1}
    assert {message["MessageId"] for message in got} == {ids["twice"], ids["once"]}
    for message in got:
        sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
    counted = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["All"])["Attributes"]
    assert counted["ApproximateNumberOfMessagesNotVisible"] == "0", "each copy has a receipt of its own"


def test_faults_and_taken_permissions_outlive_the_cloud(tmp_path: Path) -> None:
    faults = tmp_path / "faults.json"
    faults.write_text(json.dumps(at_start()))
    first = launch(tmp_path / "state", "--faults", str(faults))
    assert code_of(lambda: client(first, key="AKIAFROMFILE").describe_regions()) == ("Unavailable", 503)
    fault(first, "error", id="twice", code="InternalError", action="DescribeFleets", times=2)
    first.post("credentials", {"disable": ["AKIAGONE"], "deny": [{"action": "ec2:CreateFleet"}]})
    lent = client(first, "sts").get_session_token()["Credentials"]["AccessKeyId"]
    assert code_of(lambda: client(first).describe_fleets()) == ("InternalError", 500)
    first.process.send_signal(signal.SIGKILL)
    first.process.wait(timeout=10)

    second = launch(tmp_path / "state", "--faults", str(faults))
    try:
        assert [rule["id"] for rule in second.get("faults")["rules"]] == ["file", "twice"]
        assert (fired(second, "file"), fired(second, "twice")) == (1, 1)
        assert code_of(lambda: client(second).describe_fleets()) == ("InternalError", 500)
        client(second).describe_fleets()
        assert code_of(lambda: client(second, key="AKIAGONE").describe_regions()) == ("AuthFailure", 401)
        assert code_of(lambda: buy(client(second), "lt-0", "denied"))[0] == "UnauthorizedOperation"
        assert lent in second.get("credentials")["issued"]
        for name in ("faults.json", "credentials.json"):
            assert (second.state_dir / name).stat().st_mode & 0o777 == 0o600
    finally:
        second.process.send_signal(signal.SIGINT)
        second.process.wait(timeout=30)


def test_a_skewed_clock_shows_in_dates_and_refuses_signatures(cloud: Cloud) -> None:
    fault(cloud, "skew", skew_s=300, access_key="AKIASKEWED")
    skewed = client(cloud, key="AKIASKEWED")
    shown = parsedate_to_datetime(skewed.describe_regions()["ResponseMetadata"]["HTTPHeaders"]["date"])
    assert abs(shown - datetime.now(UTC) - timedelta(minutes=5)) < timedelta(seconds=5)
    plain = parsedate_to_datetime(client(cloud).describe_regions()["ResponseMetadata"]["HTTPHeaders"]["date"])
    assert abs(plain - datetime.now(UTC)) < timedelta(seconds=5)
    fault(cloud, "skew", skew_s=-1600, access_key="AKIASKEWED")
    assert code_of(lambda: skewed.describe_regions()) == ("RequestExpired", 400)


def test_faults_from_a_file_are_there_from_the_start_and_are_told_in_status_and_log(cloud: Cloud) -> None:
    assert code_of(lambda: client(cloud, key="AKIAFROMFILE").describe_regions()) == ("Unavailable", 503)
    assert fired(cloud, "file") == 1
    log = Path(cloud.state_dir / "server.log").read_text()
    assert "fault file: answers Unavailable for ec2 DescribeRegions AKIAFROMFILE" in log


def test_what_is_wrong_with_a_rule_is_said(cloud: Cloud) -> None:
    for body, said in (
        ({"rules": [{"kind": "error"}]}, "code: got None, kind 'error' needs one"),
        ({"rules": [{"kind": "lost", "action": "x"}]}, "kind 'lost' reads only"),
    ):
        with pytest.raises(urllib.error.HTTPError) as caught:
            cloud.post("faults", body)
        assert caught.value.code == 400
        assert said in json.load(caught.value)["error"]
