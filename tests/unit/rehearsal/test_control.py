"""The rehearsal's own endpoints, asked without a server."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from gpucost.rehearsal.control import Control
from gpucost.rehearsal.faults.control import FaultsControl
from gpucost.rehearsal.faults.credentials import Credentials
from gpucost.rehearsal.faults.injector import Injector
from gpucost.rehearsal.machines.hypervisor import Hypervisor


@pytest.mark.parametrize("ailment", [None, "machines were last looked after 17 s ago: Too many open files"])
def test_a_cloud_that_does_not_look_after_its_machines_says_so(ailment: str | None) -> None:
    hypervisor = Mock(spec=Hypervisor)
    hypervisor.ailment.return_value = ailment
    faults = FaultsControl(Injector(), Credentials("123456789012"))
    control = Control(Mock(), Mock(), hypervisor, Mock(), Mock(), Mock(), faults)
    status, document = control.answer("GET", "health", b"")
    assert (status, document) == ((503, {"status": "ill", "error": ailment}) if ailment else (200, {"status": "ok"}))
