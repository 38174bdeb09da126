"""Whom does a machine's memory limit kill?"""

from __future__ import annotations

import pytest

from gpucost.rehearsal.machines.memory import MIB, MemoryLimit
from gpucost.rehearsal.machines.processes import Process

INIT = 1


def table(**mib: int) -> dict[int, Process]:
    """Processes by name with the MiB that each has in memory; the first is init."""
    return {pid: Process(pid, 1, 1, 0, size * MIB, name) for pid, (name, size) in enumerate(mib.items(), start=INIT)}


def limit(mib: int | None, most: int | None = None) -> MemoryLimit:
    return MemoryLimit(lambda _type: mib, most, pss_of=lambda pid: None)


@pytest.mark.parametrize(
    ("of_type", "most", "expected"), [(1000, None, 1000), (1000, 300, 300), (1000, 2000, 1000), (None, 300, 300)]
)
def test_a_machine_has_what_its_type_has_or_less_on_a_small_host(
    of_type: int | None, most: int | None, expected: int
) -> None:
    assert limit(of_type, most).limit_mib("t") == expected


def test_without_any_figure_there_is_no_limit() -> None:
    endless = limit(None)
    assert endless.limit_mib("t") is None
    assert endless.victim("t", table(init=1, hog=10**9), INIT) is None


def test_what_processes_share_counts_once() -> None:
    # three workers that share 300 of their 350 MiB
    machine = table(init=1, one=350, two=350, three=350)
    shares = {1: 1, 2: 150, 3: 150, 4: 150}
    memory = MemoryLimit(lambda _type: 500, pss_of=lambda pid: shares[pid] * MIB)
    assert memory.victim("t", machine, INIT) is None
    shares[3] = 250
    victim = memory.victim("t", machine, INIT)
    assert victim is not None
    assert victim.name == "two"


def test_init_is_spared_also_when_it_is_the_largest() -> None:
    machine = table(init=900, other=200)
    memory = MemoryLimit(lambda _type: 1000, pss_of=lambda pid: machine[pid].rss)
    victim = memory.victim("t", machine, INIT)
    assert victim is not None
    assert victim.name == "other"
    assert memory.victim("t", table(init=2000), INIT) is None


def test_shares_are_read_only_of_machines_that_may_use_too_much() -> None:
    asked: list[int] = []

    def pss_of(pid: int) -> int:
        asked.append(pid)
        return 0

    memory = MemoryLimit(lambda _type: 1000, pss_of=pss_of)
    memory.victim("t", table(init=1, fine=900), INIT)
    assert asked == []
