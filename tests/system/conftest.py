"""One stack of real services for all system tests of this session; each test leaves it as it found it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from demo.airflow_api import AirflowApi
from demo.job import services_of
from demo.settings import StackSettings
from demo.stack import Stack
from gpucost.lifecycle.services import Services
from tests.system.rehearsal import Cloud, launch, two_regions


@dataclass(frozen=True)
class Running:
    """A stack that is up, and the ways to talk to it."""

    stack: Stack
    airflow: AirflowApi
    services: Services

    @property
    def rehearsal(self) -> str:
        """Address of the rehearsal cloud."""
        return self.stack.addresses()["rehearsal"]


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The whole stack, on free ports, in a folder of its own, ended after the last test."""
    home: Path = tmp_path_factory.mktemp("stack")
    stack = Stack(StackSettings(home=home, any_ports=True))
    stack.up()
    try:
        password = stack.credentials().passwords["admin"]
        with AirflowApi(stack.addresses()["airflow"], "admin", password) as airflow:
            airflow.login()
            yield Running(stack, airflow, services_of(stack))
    finally:
        stack.down()


@pytest.fixture(scope="session")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """One rehearsal cloud of two regions for every module that asks for no other."""
    folder: Path = tmp_path_factory.mktemp("rehearsal")
    started = launch(folder / "state", market=two_regions(folder / "market.json"))
    yield started
    started.process.send_signal(signal.SIGINT)
    assert started.process.wait(timeout=30) == 0


@pytest.fixture
def no_leftovers(cloud: Cloud) -> Iterator[None]:
    """Every machine of the test is gone after it, so that the next one finds full pools."""
    yield
    cloud.end_all()
