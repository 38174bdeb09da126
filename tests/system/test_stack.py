"""Starting and ending services for real: the object store, and small programs in the place of the others."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from demo.catalogue import catalogue
from demo.health import http_ok, s3_client
from demo.processes import LinuxProcesses, ProcessInfo, family
from demo.records import RecordFile
from demo.service import ServiceSpec
from demo.settings import StackError, StackSettings
from demo.stack import Stack

REPOSITORY = Path(__file__).resolve().parents[2]

# Leaves neither on SIGTERM nor with its parent: a child in a session of its own.
STUBBORN = """
import http.server, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""

BROKEN = """
import time
for n in range(100): print("INFO starting", n, flush=True)
time.sleep(0.5)
raise RuntimeError("the disk is made of cheese")
"""


def stub(name: str, program: str, *arguments: str, port: int) -> ServiceSpec:
    return ServiceSpec(
        name=name,
        command=(sys.executable, "-c", program, *arguments),
        environment=dict(os.environ),
        check=http_ok(f"http://127.0.0.1:{port}/"),
        stop_grace=0.5,
    )


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def home(tmp_path):
    """A home folder; whatever a test leaves running in it is ended."""
    yield tmp_path / "home"
    Stack(StackSettings(home=tmp_path / "home")).down()


def living(home: Path) -> list[ProcessInfo]:
    record = RecordFile(home / "services.json").read()
    roots = [(service.pid, service.started) for service in record.services.values()]
    return family(LinuxProcesses(), roots, record.stack_id)


def with_stub(home: Path, port: int, *more: ServiceSpec) -> Stack:
    return Stack(
        StackSettings(home=home, services=("s3",), any_ports=True),
        specs=lambda settings, ports, credentials: [
            *catalogue(settings, ports, credentials),
            stub("web", STUBBORN, str(port), port=port),
            *more,
        ],
    )


def test_a_stack_comes_up_once_keeps_its_data_and_leaves_no_process(home, port):
    stack = with_stub(home, port)
    stack.up()
    keys = stack.credentials().store
    s3_client(stack.addresses()["s3"], keys).put_object(Bucket="gpucost", Key="a", Body=b"kept")
    pids = {name: stack.service(name).pid for name in ("s3", "web")}

    # A second up finds everything; where one service has crashed, only that one is started.
    again = with_stub(home, port)
    again.up()
    assert {name: again.service(name).pid for name in pids} == pids
    again.service("web").kill()
    assert len(living(home)) == 1
    last = with_stub(home, port)
    last.up()
    assert last.service("s3").pid == pids["s3"]
    assert last.service("web").pid != pids["web"]
    assert last.status() == {"s3": "ready", "web": "ready"}

    before = living(home)
    assert len(before) == 3
    assert last.down() == 3
    table = LinuxProcesses()
    assert [info for info in before if table.info(info.pid) == info] == []
    assert last.down() == 0

    last.up()
    assert s3_client(last.addresses()["s3"], keys).get_object(Bucket="gpucost", Key="a")["Body"].read() == b"kept"


def test_a_service_that_fails_is_named_with_why_and_everything_is_ended(home, port):
    broken = stub("broken", BROKEN, port=1)
    stack = with_stub(home, port, broken)
    with pytest.raises(StackError) as failure:
        stack.up()
    message = str(failure.value)
    assert message.startswith("broken ended with exit status 1; from ")
    assert "RuntimeError: the disk is made of cheese" in message
    assert len(message.splitlines()) == 16
    assert living(home) == []


def command(home: Path, *arguments: str, port: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "GPUCOST_S3_PORT": str(port), "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'plugins'}"}
    return subprocess.Popen(
        [sys.executable, "-m", "demo", *arguments, "--home", str(home)],
        env=environment,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def begin_up(home: Path, port: int) -> subprocess.Popen[str]:
    """`up`, at the moment when its service has just been started."""
    up = command(home, "up", "--services", "s3", port=port)
    deadline = time.monotonic() + 60
    while not RecordFile(home / "services.json").read().services:
        assert up.poll() is None, up.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return up


def test_ctrl_c_ends_what_was_started(home, port):
    up = begin_up(home, port)
    up.send_signal(signal.SIGINT)
    up.communicate(timeout=60)
    assert up.returncode == 130
    assert living(home) == []


def test_the_leftovers_of_a_killed_up_do_not_disturb_the_next_one(home, port):
    up = begin_up(home, port)
    up.kill()
    up.communicate(timeout=60)
    assert len(living(home)) == 1

    second = command(home, "up", "--services", "s3", port=port)
    out, err = second.communicate(timeout=120)
    assert second.returncode == 0, err
    assert f"http://127.0.0.1:{port}" in out
    assert len(living(home)) == 1

    down = command(home, "down", port=port)
    assert down.wait(timeout=60) == 0
    assert living(home) == []


class Answer:
    """A check that says what it is told to say."""

    def __init__(self, *says: str | None) -> None:
        self.says = list(says)

    def __call__(self, _started_at: float) -> str | None:
        return self.says.pop(0) if self.says else None


def sleepers(home: Path, **checks: Answer) -> Stack:
    """Small services; each but `api-server` is asked through that one."""
    specs = [
        ServiceSpec(
            name=name,
            command=(sys.executable, "-c", "import time; time.sleep(600)"),
            environment={},
            check=check,
            through=None if name == "api-server" else "api-server",
            stop_grace=0.5,
        )
        for name, check in ((name.replace("_", "-"), check) for name, check in checks.items())
    ]
    return Stack(StackSettings(home=home, services=(), patience=2.0), specs=lambda *_: specs)


def pids(stack: Stack, *names: str) -> list[int | None]:
    return [stack.service(name).pid for name in names]


def test_a_service_that_answers_late_is_not_restarted(home):
    first = sleepers(home, api_server=Answer(), scheduler=Answer())
    first.up()
    again = sleepers(home, api_server=Answer("slow", "slow"), scheduler=Answer("slow"))
    again.up()
    assert pids(again, "api-server", "scheduler") == pids(first, "api-server", "scheduler")
    # One that never answers is, and the other is judged when it can be.
    last = sleepers(home, api_server=Answer(*["away"] * 9), scheduler=Answer(*["api-server is away"] * 3))
    last.up()
    assert pids(last, "api-server") != pids(first, "api-server")
    assert pids(last, "scheduler") == pids(first, "scheduler")


def test_a_dead_api_server_ends_nobody_else(home):
    first = sleepers(home, api_server=Answer(), scheduler=Answer(), triggerer=Answer())
    first.up()
    alive = pids(first, "scheduler")
    first.service("api-server").kill()
    again = sleepers(home, api_server=Answer(), scheduler=Answer(), triggerer=Answer(*["unhealthy"] * 9))
    again.up()
    assert pids(again, "scheduler") == alive
    assert pids(again, "triggerer") != pids(first, "triggerer")
    assert len(living(home)) == 3


def test_what_waits_for_the_next_start_of_a_killed_service_is_left_alone_by_up_and_ended_by_down(home):
    # As the rehearsal cloud's guard, which keeps the machines of a cloud that was killed.
    program = """
import os, pathlib, sys, time
if pid := os.fork():
    note = pathlib.Path(sys.argv[1])
    note.with_suffix(".part").write_text(str(pid))
    note.with_suffix(".part").replace(note)
else:
    os.setsid()
time.sleep(600)
"""
    note = home / "note"

    def waiting() -> set[int]:
        return {int(note.read_text())} if note.exists() else set()

    def ready(started_at: float) -> str | None:
        return None if note.exists() and note.stat().st_mtime > started_at else "no note yet"

    def stack() -> Stack:
        spec = ServiceSpec(
            name="cloud",
            command=(sys.executable, "-c", program, str(note)),
            environment={},
            check=ready,
            survivors=waiting,
            stop_grace=0.5,
        )
        return Stack(StackSettings(home=home, services=()), specs=lambda *_: [spec])

    first = stack()
    first.up()
    [before] = waiting()
    os.kill(first.service("cloud").pid, signal.SIGKILL)

    again = stack()
    again.up()
    assert {before, *waiting(), again.service("cloud").pid} == {info.pid for info in living(home)}

    again.down()
    assert living(home) == []


def demo_in_mid_training(home: Path, stack_id: str) -> subprocess.Popen[str]:
    """A process that holds the demo's lock and has the training beside it running, like `make demo`."""
    program = """
import os, pathlib, subprocess, sys
from demo.settings import StackSettings
from demo.stack import Stack
home = pathlib.Path(sys.argv[1])
with Stack(StackSettings(home=home, services=())).demo():
    (home / "reference-abc").mkdir()
    child = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(child, env={"GPUCOST_STACK": sys.argv[2]}, stdout=subprocess.DEVNULL)
    print("runs", flush=True)
    sys.stdin.read()
"""
    demo = subprocess.Popen(
        [sys.executable, "-c", program, str(home), stack_id],
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'plugins'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert demo.stdout is not None
    assert demo.stdout.readline() == "runs\n"
    return demo


def test_up_leaves_a_running_demo_alone_and_clears_up_after_a_killed_one(home):
    stack = sleepers(home, api_server=Answer())
    stack.up()
    demo = demo_in_mid_training(home, stack.stack_id)
    stack.up()
    assert len(living(home)) == 2
    assert (home / "reference-abc").exists()
    with pytest.raises(StackError, match="another demo runs in"), stack.demo():
        pass

    demo.kill()
    demo.communicate(timeout=60)
    assert len(living(home)) == 2
    stack.up()
    assert len(living(home)) == 1
    assert not (home / "reference-abc").exists()


def test_a_busy_port_of_the_user_is_said_with_variable_port_and_listener(home, port):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        listener.listen()
        up = command(home, "up", "--services", "s3", port=port)
        _, err = up.communicate(timeout=60)
    assert up.returncode == 1
    assert f"GPUCOST_S3_PORT={port} is busy" in err
    assert f"(pid {os.getpid()}) listens there" in err
    assert living(home) == []
