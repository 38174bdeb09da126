"""Views that are kept: never an old one, and the same XML as one made anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpucost.rehearsal.api import kept, views
from gpucost.rehearsal.api.kept import KeptViews
from gpucost.rehearsal.book.records import Instance, LaunchSpec
from gpucost.rehearsal.protocol import wire
from gpucost.rehearsal.protocol.serializer import AnswerError, Unchanging
from tests.fakes.rehearsal import ORIGIN, POOL

ZONE_IDS = {POOL.zone: "use1-az1"}
ONE = Instance(
    id="i-00000000000000001",
    number=0,
    launch_id="fleet-1",
    client_token="",
    pool=POOL,
    lifecycle="spot",
    spec=LaunchSpec(image_id="ami-1"),
    tags={"a": "<1>"},
    created=ORIGIN,
    launched=ORIGIN,
    spot_request_id="sir-00000001",
)
OTHER = replace(ONE, id="i-00000000000000002")


def answer(*instances: dict[str, Any]) -> str:
    """DescribeInstances' XML without its request id."""
    reservation = views.reservation("r-1", "123456789012", instances)
    _, headers, body = wire.answer("DescribeInstances", {"Reservations": [reservation]})
    return body.replace(headers["x-amzn-RequestId"], "ID")


def test_a_view_is_made_once_until_the_instance_changes() -> None:
    made: list[Instance] = []

    def make(one: Instance, fact: str) -> dict[str, Any]:
        made.append(one)
        return {"State": one.state, "Fact": fact}

    shown: KeptViews[[str]] = KeptViews(make)
    running = replace(ONE, state="running")

    assert shown.of(ONE, "x") is shown.of(ONE, "x")
    assert shown.of(OTHER, "x") == {"State": "pending", "Fact": "x"}
    assert made == [ONE, OTHER]
    assert shown.of(running, "x") == {"State": "running", "Fact": "x"}
    assert shown.of(running, "y") == {"State": "running", "Fact": "y"}, "what else it is made from counts too"
    assert shown.of(ONE, "y") == {"State": "pending", "Fact": "y"}


def test_no_more_views_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_KEPT", 1)
    shown: KeptViews[[]] = KeptViews(lambda one: {"State": one.state})
    first = shown.of(ONE)

    assert shown.of(OTHER) is shown.of(OTHER)
    assert shown.of(ONE) == first
    assert shown.of(ONE) is not first


def test_xml_that_is_kept_is_the_xml_that_would_be_written() -> None:
    plain = [views.instance(one, ZONE_IDS, "123456789012") for one in (ONE, OTHER)]
    unchanging = [Unchanging(view) for view in plain]

    assert answer(*unchanging) == answer(*plain)
    assert answer(*unchanging) == answer(*plain), "and again, now that it is kept"
    assert answer(unchanging[1], unchanging[0]) == answer(plain[1], plain[0])


def test_another_place_of_the_same_structure_has_its_own_tag() -> None:
    state = Unchanging({"Name": "running", "Code": 16})
    change = {"InstanceId": ONE.id, "PreviousState": state, "CurrentState": state}

    for _ in range(2):
        _, _, body = wire.answer("TerminateInstances", {"TerminatingInstances": [change]})
        inner = "<name>running</name><code>16</code>"
        assert f"<previousState>{inner}</previousState><currentState>{inner}</currentState>" in body


def test_what_the_model_does_not_have_is_refused_in_a_kept_view_too() -> None:
    wrong = Unchanging({"InstanceId": ONE.id, "Colour": "red"})

    for _ in range(2):
        with pytest.raises(AnswerError, match="Colour"):
            answer(wrong)
