"""The node reads who it is and what threatens it from instance metadata, version 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

import pytest

from gpucost.clock import ClockSpec, SpecClock
from gpucost.reasons import Reason
from gpucost.training.agent.identity import Identity, Unidentified, find_identity
from gpucost.training.agent.imds import Metadata
from gpucost.training.agent.notices import Action, Notices, Rebalance, parse_action, parse_rebalance
from gpucost.training.agent.orders import Order, Save, Stop
from gpucost.training.agent.watch import PASSED_SECONDS, NoticeWatch

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
TAGS = {"gpucost:job": "j", "gpucost:lease": "l", "gpucost:attempt": "4"}


class Service:
    """A metadata service that asks for a token, as EC2's does."""

    def __init__(self, **documents: str) -> None:
        self.documents = documents
        self.requests: list[tuple[str, str]] = []
        self.tokens = 0
        self.down = False

    def set(self, path: str, text: str) -> Service:
        self.documents[path] = text
        return self

    def __call__(self, method: str, url: str, headers: Mapping[str, str]) -> tuple[int, str]:
        self.requests.append((method, url))
        if self.down:
            raise ConnectionRefusedError("connection refused")
        if method == "PUT":
            assert url.endswith("/latest/api/token")
            assert int(headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 0
            self.tokens += 1
            return 200, f"token-{self.tokens}"
        if headers.get("X-aws-ec2-metadata-token") != f"token-{self.tokens}":
            return 401, ""
        path = url.split("/latest/meta-data/")[1]
        return (200, self.documents[path]) if path in self.documents else (404, "")


def with_tags(service: Service) -> Service:
    for key, value in TAGS.items():
        service.set(f"tags/instance/{key}", value)
    return service


@pytest.mark.parametrize(
    ("environ", "base"),
    [
        ({}, "http://169.254.169.254/latest/"),
        ({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9/imds/i-1/"}, "http://127.0.0.1:9/imds/i-1/latest/"),
        ({"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9/latest/"),
    ],
)
def test_the_base_may_have_a_prefix(environ: dict[str, str], base: str) -> None:
    service = Service().set("instance-id", "i-1")
    assert Metadata(environ, service).get("instance-id") == "i-1"
    assert all(url.startswith(base) for _, url in service.requests)


def test_one_token_serves_many_questions_and_is_renewed() -> None:
    service = Service().set("instance-id", "i-1")
    now = [0.0]
    metadata = Metadata({}, service, real=lambda: now[0])
    for _ in range(5):
        metadata.get("instance-id")
    assert service.tokens == 1
    now[0] = 200
    metadata.get("instance-id")
    assert service.tokens == 2
    service.tokens = 9  # The service forgot our token, as after a restart.
    assert metadata.get("instance-id") == "i-1"


def test_another_answer_is_an_error() -> None:
    with pytest.raises(OSError, match="answered 500"):
        Metadata({}, lambda method, url, headers: (500, "")).get("instance-id")


def test_the_environment_goes_before_the_tags() -> None:
    service = with_tags(Service())
    environ = {"GPUCOST_JOB": "a", "GPUCOST_LEASE": "b", "GPUCOST_ATTEMPT": "2"}
    assert find_identity(environ, Metadata({}, service)) == Identity("a", "b", 2)
    assert service.requests == []
    assert find_identity({}, Metadata({}, service)) == Identity("j", "l", 4)


class Waiting:
    """Time that passes only by waiting; `then` happens at a moment of it, in seconds."""

    def __init__(self, **at: Callable[[], object]) -> None:
        self.now = 0.0
        self.then = {float(second.strip("_")): act for second, act in at.items()}

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for second in [second for second in self.then if second <= self.now]:
            self.then.pop(second)()

    def find(self, service: Service, environ: Mapping[str, str] | None = None) -> Identity:
        return find_identity(environ or {}, Metadata({}, service), self.sleep, lambda: self.now)


def test_tags_that_show_late_are_waited_for() -> None:
    service = Service()
    assert Waiting(_30=lambda: with_tags(service)).find(service) == Identity("j", "l", 4)
    with pytest.raises(Unidentified, match="expected GPUCOST_JOB"):
        Waiting(_70=lambda: with_tags(service)).find(service := Service())


def test_a_service_that_is_away_at_the_boot_is_waited_for_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    service = Service()
    service.down = True
    waiting = Waiting(_540=lambda: setattr(service, "down", False), _580=lambda: with_tags(service))
    assert waiting.find(service) == Identity("j", "l", 4)
    assert capsys.readouterr().err.count("connection refused; asking again for up to 600 s") == 1


def test_a_node_that_belongs_to_nobody_says_what_is_missing() -> None:
    service = Service().set("tags/instance/gpucost:job", "j")
    waiting = Waiting()
    with pytest.raises(Unidentified, match="GPUCOST_LEASE or the tag gpucost:lease, GPUCOST_ATTEMPT or"):
        waiting.find(service)
    assert waiting.now <= 60
    service.down = True
    with pytest.raises(Unidentified, match="connection refused"):
        waiting.find(service)
    assert waiting.now <= 700
    with pytest.raises(Unidentified, match="attempt: got '0'"):
        waiting.find(service, {"GPUCOST_JOB": "a", "GPUCOST_LEASE": "b", "GPUCOST_ATTEMPT": "0"})


def test_notices_are_read() -> None:
    assert parse_action('{"action": "terminate", "time": "2026-11-30T12:00:00Z"}') == Action("terminate", NOON)
    assert parse_rebalance('{"noticeTime": "2026-11-30T12:00:00Z"}') == Rebalance(NOON)


@pytest.mark.parametrize("text", ["", "[]", '{"action": "stop"}', '{"action": "stop", "time": "soon"}', "<html>"])
def test_a_notice_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_action(text)


def test_each_notice_is_told_once() -> None:
    service = Service()
    notices = Notices(Metadata({}, service))
    assert list(notices.new()) == []
    service.set("events/recommendations/rebalance", '{"noticeTime": "2026-11-30T11:00:00Z"}')
    assert list(notices.new()) == [Rebalance(NOON - timedelta(hours=1))]
    assert list(notices.new()) == []
    service.set("spot/instance-action", '{"action": "stop", "time": "2026-11-30T12:00:00Z"}')
    assert list(notices.new()) == [Action("stop", NOON)]


def test_a_rebalance_saves_and_an_action_stops_before_its_time() -> None:
    service = Service()
    service.set("events/recommendations/rebalance", '{"noticeTime": "2026-11-30T11:00:00Z"}')
    service.set("spot/instance-action", '{"action": "terminate", "time": "2026-11-30T12:00:00Z"}')
    real = datetime(2030, 1, 1, tzinfo=UTC)
    clock = SpecClock(ClockSpec(origin_real=real, origin=NOON - timedelta(minutes=20), speed=60), real_now=lambda: real)
    orders: list[Order] = []
    NoticeWatch(Notices(Metadata({}, service)), clock, orders.append).look()
    stop, save = orders
    assert isinstance(save, Save)
    assert isinstance(stop, Stop)
    assert stop.reason is Reason.INTERRUPTED
    assert stop.within == pytest.approx(20)  # Twenty minutes at sixty times the speed are twenty real seconds.


def test_a_notice_whose_time_has_passed_leaves_some_to_save_in() -> None:
    service = Service().set("spot/instance-action", '{"action": "terminate", "time": "2026-11-30T12:00:00Z"}')
    late = NOON + timedelta(seconds=3)
    orders: list[Order] = []
    NoticeWatch(Notices(Metadata({}, service)), SpecClock(real_now=lambda: late), orders.append).look()
    assert [order.within for order in orders if isinstance(order, Stop)] == [PASSED_SECONDS]


def test_a_notice_is_obeyed_although_another_cannot_be_read() -> None:
    service = Service().set("events/recommendations/rebalance", "[]")
    service.set("spot/instance-action", '{"action": "terminate", "time": "2026-11-30T12:00:00Z"}')
    orders: list[Order] = []
    watch = NoticeWatch(Notices(Metadata({}, service)), SpecClock(), orders.append)
    for _ in range(2):
        with pytest.raises(ValueError, match="expected a JSON object"):
            watch.look()
    assert [type(order) for order in orders] == [Stop]
