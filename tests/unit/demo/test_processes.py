"""Which processes belong to a stack, and how they end: nobody else is ever signalled."""

import os
import signal

from demo.processes import LinuxProcesses, end, family, is_alive

from .fakes import FakeProcesses


class FakeTime:
    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds

    def monotonic(self):
        return self.now


def pids(found):
    return {info.pid for info in found}


def test_a_reused_pid_is_a_stranger_with_all_its_children():
    table = FakeProcesses()
    table.add(100, started="boot:999")
    table.add(101, parent=100, session=100)
    assert not is_alive(table, 100, "boot:1")
    assert family(table, [(100, "boot:1")]) == []


def test_children_belong_also_when_they_made_a_session_of_their_own():
    table = FakeProcesses()
    table.add(100)
    table.add(101, parent=100, session=100)
    table.add(102, parent=101)
    table.add(200)
    assert pids(family(table, [(100, "boot:100")])) == {100, 101, 102}


def test_orphans_of_a_dead_leader_are_found_by_their_session():
    table = FakeProcesses()
    table.add(101, parent=1, session=100)
    assert pids(family(table, [(100, "boot:100")])) == {101}


def test_a_session_of_an_earlier_boot_means_nothing():
    table = FakeProcesses()
    table.add(101, parent=1, session=100, started="newboot:5")
    assert family(table, [(100, "boot:100")]) == []


def test_the_mark_finds_what_was_never_recorded():
    table = FakeProcesses()
    table.add(300, mark="mine")
    table.add(301, parent=300)
    table.add(400, mark="another stack's")
    assert pids(family(table, [], mark="mine")) == {300, 301}


def test_we_do_not_end_ourselves():
    table = FakeProcesses()
    table.add(os.getpid(), mark="mine")
    assert family(table, [], mark="mine") == []


def test_those_that_leave_on_sigterm_are_not_killed():
    table, time = FakeProcesses(), FakeTime()
    table.add(100)
    killed = end(table, lambda: family(table, [(100, "boot:100")]), 5.0, sleep=time.sleep, monotonic=time.monotonic)
    assert killed == 0
    assert table.signals == [(100, signal.SIGTERM)]


def test_those_that_stay_are_killed_after_their_grace_and_not_before():
    table, time = FakeProcesses(), FakeTime()
    table.add(100)
    table.add(101, parent=100)
    table.stubborn = {100}
    killed = end(table, lambda: family(table, [(100, "boot:100")]), 5.0, sleep=time.sleep, monotonic=time.monotonic)
    assert killed == 1
    assert table.signals == [(100, signal.SIGTERM), (101, signal.SIGTERM), (100, signal.SIGKILL)]
    assert 5.0 <= time.now < 5.2


def test_who_wants_another_signal_is_asked_by_that_one():
    table, time = FakeProcesses(), FakeTime()
    table.add(100)
    table.add(101, parent=100)
    table.stubborn = {100}
    end(
        table,
        lambda: family(table, [(100, "boot:100")]),
        5.0,
        asking={100: signal.SIGINT},
        sleep=time.sleep,
        monotonic=time.monotonic,
    )
    assert table.signals == [(100, signal.SIGINT), (101, signal.SIGTERM), (100, signal.SIGKILL)]


def test_the_real_table_knows_this_process_and_its_age():
    table = LinuxProcesses()
    me = table.info(os.getpid())
    assert me is not None
    assert me.parent == os.getppid()
    assert is_alive(table, me.pid, me.started)
    assert not is_alive(table, me.pid, me.started + "0")
    assert me in table.all()
