"""However a program ends, its node says why, leaves nothing running, and does so in time.

One process where it makes no difference, two where it does. Programs that need no torch do without: they start faster.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpucost.job import FolderSync, HangWatch
from gpucost.jobstore import Command, Control, ExitRecord
from gpucost.reasons import Reason
from tests.system.nodes import SMALL_PROGRAM, Job, Node, nodes, small, training

__all__ = ["nodes", "small"]

Small = Callable[..., Job]

STEPS = textwrap.dedent(
    """
    import os, sys, time
    from datetime import UTC, datetime
    from pathlib import Path
    from gpucost.training.workdir import Progress, Workdir

    def steps(number):
        for step in range(1, number + 1):
            if os.environ["RANK"] == "0":
                Workdir(Path(os.environ["GPUCOST_WORKDIR"])).write_progress(
                    Progress(step=step, at=datetime.now(UTC), resumed_step=0, total_steps=100)
                )
            time.sleep(0.6)

    def wait_for_ever():
        time.sleep(10_000)
    """
)

REPLICATED = SMALL_PROGRAM.replace("checkpointed, prepare", "checkpointed, prepare, replicated").replace(
    "torch.nn.Linear(4, 1)", "replicated(torch.nn.Linear(4, 1))"
)

TOGETHER = textwrap.dedent(
    """
    import os, sys, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def meet():
        dist.all_reduce(torch.ones(1))

    meet()
    print(f"rank {rank} of {dist.get_world_size()} is there", flush=True)
    """
)


def ended(node: Node, seconds: float = 120) -> ExitRecord:
    """Its exit record, and nothing left of it."""
    record = node.end(seconds)
    assert node.processes() == [], node.log()
    return record


def wait_until(done: Callable[[], object], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_program_that_raises_is_told_with_the_end_of_its_log(small: Small, nodes: list[Node]) -> None:
    source = "print('reading data')\nraise RuntimeError('column 7 is not a number')\n"
    job = small(source=source)
    nodes.append(node := job.start())
    record = ended(node)
    assert (record.reason, record.exit_code, node.process.returncode) == (Reason.BAD_PROGRAM, 1, 1)
    assert "RuntimeError: column 7 is not a number" in record.message
    assert job.whole_log(1) == node.workdir.log.read_text()
    assert job.whole_log(1).count("reading data") == 1


def test_of_two_processes_the_one_that_failed_first_is_told(small: Small, nodes: list[Node]) -> None:
    source = TOGETHER + "if rank == 1:\n    raise RuntimeError('column 7 is not a number')\nmeet()\n"
    job = small(source=source, world_size=2)
    nodes.append(node := job.start())
    record = ended(node)
    assert (record.reason, record.exit_code) == (Reason.BAD_PROGRAM, 1)
    assert record.message.startswith("the program (rank 1) failed: exit code 1 at step 0; its traceback:\nTraceback")
    assert record.message.endswith("RuntimeError: column 7 is not a number")
    assert 'File "train.py"' in record.message
    log = job.whole_log(1)
    assert "rank 0 of 2 is there" in log
    assert log.count("gpucost: rank 1 of 2: exit code 1; all have ended\n") == 1
    assert "torch.distributed.elastic" not in log


def test_a_program_that_ends_too_soon_is_no_success(small: Small, nodes: list[Node]) -> None:
    job = small("5", source=SMALL_PROGRAM.replace("run.finish", "print"))
    nodes.append(node := job.start())
    record = ended(node)
    assert record.reason is Reason.BAD_PROGRAM
    assert "exit code 0 at step 50 of 50 without calling run.finish" in record.message


def test_a_program_that_runs_out_of_memory_is_told_apart(small: Small, nodes: list[Node]) -> None:
    source = (
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "print('a large batch')\nbatch = bytearray(1 << 34)\n"
    )
    nodes.append(node := small(source=source).start())
    record = ended(node)
    assert (record.reason, record.exit_code, node.process.returncode) == (Reason.OUT_OF_MEMORY, 1, 2)
    assert record.message.startswith("the program ran out of memory; end of its log:\na large batch\nTraceback")


def test_one_process_of_two_that_runs_out_of_memory_is_told_apart(small: Small, nodes: list[Node]) -> None:
    source = TOGETHER + (
        "import resource\n"
        "if rank == 1:\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "    torch.empty(1 << 34)\n"
        "meet()\n"
    )
    nodes.append(node := small(source=source, world_size=2).start())
    record = ended(node)
    assert record.reason is Reason.OUT_OF_MEMORY
    assert record.message.startswith("the program (rank 1) ran out of memory; its traceback:")
    assert "can't allocate memory" in record.message


HASTY = HangWatch(times=3, at_least_seconds=3, start_seconds=120)


def test_a_program_that_hangs_is_ended_and_its_stack_is_told(small: Small, nodes: list[Node]) -> None:
    job = small(source=STEPS + "steps(4)\nwait_for_ever()\n", hang=HASTY)
    nodes.append(node := job.start())
    record = ended(node)
    assert (record.reason, record.step, node.process.returncode) == (Reason.HUNG, 4, 5)
    said = re.match(
        r"the program hung at step 4 \(training\): nothing for (\d+) s, a step usually takes (\S+) s", record.message
    )
    assert said is not None, record.message
    assert int(said[1]) >= 3
    assert float(said[2]) > 0.5
    assert "in wait_for_ever" in record.message
    assert "in wait_for_ever" in job.whole_log(1)


def test_a_program_without_a_first_step_hangs(small: Small, nodes: list[Node]) -> None:
    job = small(source=STEPS + "wait_for_ever()\n", hang=HangWatch(start_seconds=2))
    nodes.append(node := job.start())
    record = ended(node)
    assert record.reason is Reason.HUNG
    assert record.message.startswith("the program hung at step 0 (starting): nothing for ")


def test_where_one_process_hangs_the_stacks_of_both_are_told(small: Small, nodes: list[Node]) -> None:
    source = TOGETHER + STEPS + "steps(3)\nwait_for_ever() if rank == 1 else meet()\n"
    job = small(source=source, world_size=2, hang=HASTY)
    nodes.append(node := job.start())
    record = ended(node)
    assert (record.reason, record.step) == (Reason.HUNG, 3)
    by_rank = dict(
        re.findall(
            r"\[gpucost: stacks of process \d+, rank (\d): [^\n]*\]\n(.*?)(?=\n\[gpucost|\Z)", record.message, re.S
        )
    )
    assert "in meet" in by_rank["0"]
    assert "in wait_for_ever" in by_rank["1"]


def test_a_program_that_hangs_when_it_is_to_stop_was_stopped(small: Small, nodes: list[Node]) -> None:
    job = small(source=STEPS + "steps(4)\nwait_for_ever()\n", hang=HASTY)
    nodes.append(node := job.start())
    node.wait_for(training)
    job.store.ask(1, Control(sequence=1, command=Command.SAVE_AND_STOP, why="budget"))
    record = ended(node)
    assert record.reason is Reason.STOPPED
    assert record.message.startswith("budget; stopped at step 4, nothing was saved; the program hung at step 4")


def test_a_gigabyte_of_log_fills_neither_disk_nor_memory_nor_store(small: Small, nodes: list[Node]) -> None:
    source = (
        "import sys\n"
        "block = ''.join(f'{number:09d} {\"x\" * 90}\\n' for number in range(10_000))\n"
        "print('the first line')\n"
        "for _ in range(1074):\n    sys.stdout.write(block)\n"
        "print('the last line', flush=True)\nsys.exit(3)\n"
    )
    job = small(source=source)
    nodes.append(node := job.start())
    memory = 0
    while node.process.poll() is None:
        memory = max(memory, _peak_memory(node.process.pid))
        time.sleep(0.05)
    record = ended(node)
    assert record.reason is Reason.BAD_PROGRAM
    assert "the last line" in record.message
    status = node.workdir.log.stat()
    assert status.st_size > 1 << 30
    assert status.st_blocks * 512 < 24 << 20
    assert memory < 300 << 20
    log = job.whole_log(1)
    assert len(log) < 24 << 20
    _assert_in_order_with_one_gap(log, status.st_size)


def _peak_memory(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(peak[1]) * 1024 if peak else 0


def _assert_in_order_with_one_gap(log: str, size: int) -> None:
    lines = log.splitlines()
    notes = [index for index, line in enumerate(lines) if line.startswith("[gpucost: ")]
    assert lines[notes[0]].startswith("[gpucost: the log is long; ")
    left_out = re.fullmatch(r"\[gpucost: (\d+) bytes of log left out here; the end follows\]", lines[notes[1]])
    assert left_out is not None
    assert len(notes) == 2
    added = sum(len(lines[index]) + 2 for index in notes)
    assert len(log) - added + int(left_out[1]) == size
    numbers = [int(line[:9]) for line in lines if line[:9].isdecimal()]
    skips = [pair for pair in itertools.pairwise(numbers) if pair[1] != (pair[0] + 1) % 10_000]
    assert len(skips) == 1
    assert (lines[0], lines[-1]) == ("the first line", "the last line")


def test_children_that_outlive_the_program_are_ended(small: Small, nodes: list[Node]) -> None:
    source = textwrap.dedent(
        """
        import os, subprocess, sys
        sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
        subprocess.Popen(sleep, start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.execv(sleep[0], sleep)
            os._exit(0)
        os.wait()
        """
    )
    nodes.append(node := small(source=source).start())
    assert ended(node).reason is Reason.BAD_PROGRAM
    assert "2 processes outlived the program and were ended" in (node.job.folder / "agent-1.log").read_text()


def on_a_small_disk(job: Job, size: str) -> Node:
    """Start a node whose work folder lies on a disk of its own, of `size`, which only the node sees."""
    own_mounts = ("unshare", "--user", "--map-root-user", "--mount")
    if shutil.which("unshare") is None or subprocess.run([*own_mounts, "true"], check=False).returncode:
        pytest.skip("a small disk needs a mount namespace of its own")
    folder = job.folder / "node-1"
    folder.mkdir()
    mount = f'mount -t tmpfs -o size={size} none {folder} && exec "$@"'
    return job.start(around=(*own_mounts, "sh", "-c", mount, "sh"))


def test_a_disk_that_is_too_small_for_the_code_is_told_apart(small: Small, nodes: list[Node]) -> None:
    job = small(source="#" * 100_000)
    nodes.append(node := on_a_small_disk(job, "32k"))
    node.process.wait(60)
    record = job.store.exit_record(1)
    assert record is not None
    assert (record.reason, node.process.returncode) == (Reason.DISK_FULL, 4)
    assert record.message.startswith("the node's disk is full, 0 MiB are free: [Errno 28] No space left")


def test_a_program_that_fills_the_disk_is_told_apart(small: Small, nodes: list[Node]) -> None:
    source = (
        "import os\nfrom pathlib import Path\n"
        "print('writing a cache', flush=True)\n"
        "with Path('cache').open('wb') as cache:\n"
        "    while True:\n        cache.write(bytes(1 << 20))\n"
    )
    job = small(source=source)
    nodes.append(node := on_a_small_disk(job, "24m"))
    node.process.wait(60)
    record = job.store.exit_record(1)
    assert record is not None
    assert (record.reason, node.process.returncode) == (Reason.DISK_FULL, 4)
    assert record.message.startswith("the disk is full: exit code 1 at step 0; end of its log:\nwriting a cache\n")
    assert record.message.endswith("OSError: [Errno 28] No space left on device")


def test_a_process_of_two_that_is_killed_ends_the_other(small: Small, nodes: list[Node]) -> None:
    source = TOGETHER + "if rank == 1:\n    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)\nmeet()\n"
    nodes.append(node := small(source=source, world_size=2).start())
    record = ended(node)
    assert (record.reason, record.exit_code) == (Reason.BAD_PROGRAM, -signal.SIGKILL)
    assert record.message.startswith("the program (rank 1) failed: ended by SIGKILL at step 0; end of its log:\n")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_signal_to_every_process_saves_and_stops(small: Small, nodes: list[Node], world_size: int) -> None:
    """A machine that shuts down sends SIGTERM to agent and program alike."""
    job = small("10000", source=REPLICATED, world_size=world_size)
    nodes.append(node := job.start())
    node.wait_for(training, 120)
    for pid in node.processes():
        os.kill(pid, signal.SIGTERM)
    began = time.monotonic()
    record = ended(node)
    assert time.monotonic() - began < 25
    assert (record.reason, record.exit_code, node.process.returncode) == (Reason.INTERRUPTED, 75, 75)
    assert record.saved_step == record.step > 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_outlives_an_agent_that_is_killed(small: Small, nodes: list[Node], world_size: int) -> None:
    source = (TOGETHER if world_size > 1 else "import time\n") + "print('all there', flush=True)\ntime.sleep(10_000)\n"
    nodes.append(node := small(source=source, world_size=world_size).start())
    wait_until(lambda: node.workdir.log.exists() and node.workdir.log.read_text().count("all there") == world_size)
    assert len(node.processes()) >= 2
    node.process.kill()
    wait_until(lambda: node.processes() == [], seconds=20)


def test_another_recipe_is_taken_on_the_same_machine(small: Small, nodes: list[Node]) -> None:
    job = small("10000")
    nodes.append(node := job.start())
    node.wait_for(training)
    job.store.ask(1, Control(sequence=1, command=Command.RECONFIGURE, recipe={"batch": -4}, why="tuning"))
    agent_log = node.job.folder / "agent-1.log"
    wait_until(lambda: "tuning: the recipe is refused, going on as before" in agent_log.read_text())
    job.store.ask(1, Control(sequence=2, command=Command.RECONFIGURE, recipe={"workers": 0}, why="tuning"))
    node.wait_for(lambda progress: (progress.resumed_step or 0) > 0 and progress.step > (progress.resumed_step or 0))
    assert node.workdir.job().recipe.workers == 0
    resumed = node.workdir.progress()
    assert resumed is not None
    assert resumed.resumed_step == resumed.saved_step
    job.store.ask(1, Control(sequence=3, command=Command.SAVE_AND_STOP, why="budget"))
    record = ended(node)
    assert (record.reason, record.attempt) == (Reason.STOPPED, 1)
    assert record.saved_step == record.step > (resumed.resumed_step or 0)


SAVES_ITSELF = textwrap.dedent(
    """
    import json, os, pathlib, signal, sys, time
    folder = pathlib.Path(os.environ["GPUCOST_FOLDER"])
    asked = []
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
    saved = folder / "state.txt"
    step = int(saved.read_text()) if saved.exists() else 0
    print("going on from", step, flush=True)
    while step < int(sys.argv[1]) and not asked:
        time.sleep(0.05)
        step += 1
    saved.write_text(str(step))
    if asked:
        sys.exit(1)
    (folder / "results.json").write_text(json.dumps({"steps": step, "name": "x"}))
    """
)


def test_a_program_that_saves_by_itself_goes_on_after_a_stop(small: Small, nodes: list[Node]) -> None:
    sync = FolderSync(folder="mine", every_seconds=1)
    job = small("40", source=SAVES_ITSELF, folder_sync=sync)
    nodes.append(first := job.start())
    wait_until(lambda: first.workdir.log.exists() and "going on from 0" in first.workdir.log.read_text())
    first.process.send_signal(signal.SIGTERM)
    record = ended(first)
    assert record.reason is Reason.INTERRUPTED
    assert "what it saved is kept" in record.message
    nodes.append(second := job.start())
    record = ended(second)
    assert record.reason is Reason.COMPLETED, record.message
    assert record.results == {"steps": 40}
    started = re.search(r"going on from (\d+)", job.whole_log(2))
    assert started is not None
    assert 0 < int(started[1]) < 40


@pytest.mark.parametrize(
    "damage", ["shutil.rmtree(work)", "(work / 'progress.json').mkdir()", "os.remove(log); log.mkdir()"]
)
def test_a_program_that_damages_its_work_folder_is_told_by_its_exit_code(
    small: Small, nodes: list[Node], damage: str
) -> None:
    source = (
        "import os, shutil, sys, time\nfrom pathlib import Path\n"
        "work = Path(os.environ['GPUCOST_WORKDIR'])\nlog = work / 'program.log'\n"
        f"{damage}\ntime.sleep(1.5)\nsys.exit(3)\n"
    )
    job = small(source=source)
    nodes.append(node := job.start())
    node.process.wait(60)
    record = job.store.exit_record(1)
    assert record is not None
    assert (record.reason, record.exit_code, node.process.returncode) == (Reason.BAD_PROGRAM, 3, 1)


@pytest.mark.parametrize("code", [75, 76])
def test_an_exit_code_that_means_something_else_to_the_program_is_a_failure(
    small: Small, nodes: list[Node], code: int
) -> None:
    nodes.append(node := small(source=f"raise SystemExit({code})\n").start())
    record = ended(node)
    assert (record.reason, record.exit_code) == (Reason.BAD_PROGRAM, code)


def test_an_agent_whose_own_log_is_full_trains_to_the_end(small: Small, nodes: list[Node]) -> None:
    nodes.append(node := small("2").start(around=("sh", "-c", 'exec "$@" >/dev/full 2>&1', "sh")))
    record = ended(node)
    assert (record.reason, record.step, node.process.returncode) == (Reason.COMPLETED, 20, 0)


def test_an_argument_that_no_program_can_be_given_is_refused(small: Small, nodes: list[Node]) -> None:
    nodes.append(node := small("a\0b", source="print('never')\n").start())
    node.process.wait(60)
    record = node.job.store.exit_record(1)
    assert record is not None
    assert record.reason is Reason.BAD_REQUEST
    assert record.message == "the program cannot be started: embedded null byte"


@pytest.mark.parametrize("what", ["parts", "head"])
def test_checkpoints_of_which_none_is_whole_do_not_start_the_job_anew(
    small: Small, nodes: list[Node], what: str
) -> None:
    job = small("2")
    nodes.append(first := job.start())
    assert ended(first).reason is Reason.COMPLETED
    kept = sorted(stat.key for stat in job.objects.scan(f"{job.store.root}/checkpoints"))

    if what == "parts":
        for key in kept:
            if key.endswith(".part"):
                job.objects.put(key, job.objects.get(key)[:-1])
    nodes.append(second := job.start())
    if what == "head":
        job.objects.put(f"{job.store.root}/head.json", b'{"fence": 2, "check')
    second.process.wait(60)
    record = job.store.exit_record(2)
    assert record is not None
    assert (record.reason, second.process.returncode) == (Reason.CHECKPOINTS_TORN, 65)
    assert ("is torn" if what == "parts" else "head.json") in record.message
    assert sorted(stat.key for stat in job.objects.scan(f"{job.store.root}/checkpoints")) == kept
