"""What the node tells of its GPUs, CPU, memory and disk, and what it does when they cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpucost.jobstore import GpuUse
from gpucost.training.agent.nvml import NoGpus, Nvml, NvmlError, Scripted, find_provider
from gpucost.training.agent.telemetry import Sampler, group_memory

GIB = 1 << 30


class Machine:
    """Linux's files, as far as they are read."""

    def __init__(self, tmp_path: Path) -> None:
        self.proc = tmp_path / "proc"
        self.cgroup = tmp_path / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()
        self.ticks(user=100, idle=900)
        (self.proc / "meminfo").write_text(
            f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {16 << 20} kB\nHugePages_Total: 0\n"
        )

    def ticks(self, *, user: int, idle: int, iowait: int = 0, guest: int = 0) -> None:
        (self.proc / "stat").write_text(f"cpu  {user} 0 0 {idle} {iowait} 0 0 0 {guest} 0\ncpu0 1 1 1 1\n")

    def limit(self, path: str, limit: str, used: int, inactive: int = 0) -> None:
        group = self.cgroup / path
        group.mkdir(parents=True, exist_ok=True)
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")

    def sampler(self, tmp_path: Path, provider: Any = None) -> Sampler:
        return Sampler({}, provider or NoGpus(), folder=tmp_path, proc=self.proc, cgroup=self.cgroup)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_cpu_is_told_from_the_second_sample_on(machine: Machine, tmp_path: Path) -> None:
    sampler = machine.sampler(tmp_path)
    assert sampler.sample().cpu_percent is None
    machine.ticks(user=160, idle=920, iowait=20, guest=60)
    assert sampler.sample().cpu_percent == 60.0
    machine.ticks(user=160, idle=1020, iowait=20, guest=60)
    assert sampler.sample().cpu_percent == 0.0
    assert sampler.sample().cpu_percent is None, "no time has passed"


def test_memory_is_the_machines_without_a_limit(machine: Machine, tmp_path: Path) -> None:
    (machine.proc / "self" / "cgroup").write_text("0::/user/job\n")
    machine.limit("user/job", "max", 3 * GIB)
    sample = machine.sampler(tmp_path).sample()
    assert (sample.memory_used, sample.memory_total) == (48 * GIB, 64 * GIB)


def test_memory_is_the_smallest_limit_above_the_process(machine: Machine, tmp_path: Path) -> None:
    (machine.proc / "self" / "cgroup").write_text("1:name=systemd:/x\n0::/pod/container\n")
    machine.limit("pod", str(8 * GIB), 5 * GIB, inactive=2 * GIB)
    machine.limit("pod/container", str(16 * GIB), 4 * GIB)
    sample = machine.sampler(tmp_path).sample()
    assert (sample.memory_used, sample.memory_total) == (3 * GIB, 8 * GIB)


def test_a_limit_above_the_machines_memory_is_none(machine: Machine, tmp_path: Path) -> None:
    (machine.proc / "self" / "cgroup").write_text("0::/\n")
    machine.limit("", str(1 << 50), GIB)
    assert machine.sampler(tmp_path).sample().memory_total == 64 * GIB


def test_limits_outside_the_container_are_not_taken_for_its_own(machine: Machine) -> None:
    own = machine.proc / "self" / "cgroup"
    own.write_text("0::/../other\n")
    machine.limit("", str(8 * GIB), GIB)
    machine.limit("../other", str(2 * GIB), GIB)
    assert group_memory(own, machine.cgroup) == (GIB, 8 * GIB)


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    sampler = Sampler({}, NoGpus(), folder=tmp_path / "none", proc=tmp_path / "no", cgroup=tmp_path / "no")
    assert sampler.sample().model_dump(exclude_none=True) == {"gpus": ()}


def test_disk_free_is_that_of_the_work_folder(machine: Machine, tmp_path: Path) -> None:
    free = machine.sampler(tmp_path).sample().disk_free
    assert free is not None
    assert free > 0


class Moody:
    """A provider that fails when told to."""

    def __init__(self) -> None:
        self.fails = True

    def read(self) -> tuple[GpuUse, ...]:
        if self.fails:
            raise NvmlError("GPU is lost")
        return (GpuUse(index=0, name="T4"),)


def test_a_provider_that_fails_is_said_once_and_asked_again(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    provider = Moody()
    sampler = machine.sampler(tmp_path, provider)
    assert sampler.sample().gpus == ()
    assert sampler.sample().gpus == ()
    assert capsys.readouterr().err.count("GPU is lost") == 1
    provider.fails = False
    assert [gpu.name for gpu in sampler.sample().gpus] == ["T4"]
    provider.fails = True
    assert sampler.sample().gpus == ()
    assert capsys.readouterr().err.count("GPU is lost") == 1


ROWS = [[{"index": 0, "utilization_percent": 10.0}], [{"index": 0, "utilization_percent": 90.0}]]


@pytest.mark.parametrize(
    "text",
    ["\n".join(json.dumps(row) for row in ROWS) + "\n", json.dumps(ROWS), json.dumps(ROWS, indent=1)],
    ids=["lines", "list", "indented list"],
)
def test_a_script_gives_row_after_row_and_then_the_last(tmp_path: Path, text: str) -> None:
    script = tmp_path / "gpus.json"
    script.write_text(text)
    sampler = Sampler({"GPUCOST_GPU_SCRIPT": str(script)}, folder=tmp_path)
    assert [sampler.sample().gpus[0].utilization_percent for _ in range(4)] == [10.0, 90.0, 90.0, 90.0]


@pytest.mark.parametrize("text", ["", "[[{'index': 0}]]", '[{"nothing": 1}]', '{"index": 0}'])
def test_a_wrong_script_is_refused_and_ends_nothing(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "gpus.json"
    script.write_text(text)
    with pytest.raises(ValueError):
        Scripted(script)
    assert Sampler({"GPUCOST_GPU_SCRIPT": str(script)}, folder=tmp_path).sample().gpus == ()
    assert "GPU telemetry" in capsys.readouterr().err


class Library:
    """libnvidia-ml of a machine with two GPUs; the second tells neither utilization nor power."""

    def __init__(self, fails: str = "") -> None:
        self._fails = fails

    def __getattr__(self, function: str) -> Any:
        return lambda *arguments: 9 if function == self._fails else getattr(Answers, function)(*arguments)


class Answers:
    @staticmethod
    def nvmlInit_v2() -> int:  # noqa: N802
        return 0

    @staticmethod
    def nvmlDeviceGetCount_v2(count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    @staticmethod
    def nvmlDeviceGetHandleByIndex_v2(index: Any, device: Any) -> int:  # noqa: N802
        device._obj.value = 100 + index.value
        return 0

    @staticmethod
    def nvmlDeviceGetName(device: Any, name: Any, size: Any) -> int:  # noqa: N802
        name.value = f"GPU {device.value}".encode()
        return 0

    @staticmethod
    def nvmlDeviceGetUtilizationRates(device: Any, use: Any) -> int:  # noqa: N802
        use._obj.gpu, use._obj.memory = 87, 40
        return 0 if device.value == 100 else 3

    @staticmethod
    def nvmlDeviceGetMemoryInfo(device: Any, memory: Any) -> int:  # noqa: N802
        memory._obj.total, memory._obj.free, memory._obj.used = 16 * GIB, 4 * GIB, 12 * GIB
        return 0

    @staticmethod
    def nvmlDeviceGetPowerUsage(device: Any, milliwatts: Any) -> int:  # noqa: N802
        milliwatts._obj.value = 69_500
        return 0 if device.value == 100 else 3


def test_nvml_tells_each_gpu_and_leaves_out_what_one_does_not_tell() -> None:
    first, second = find_provider({}, lambda _: Library()).read()
    assert first == GpuUse(
        index=0,
        name="GPU 100",
        utilization_percent=87.0,
        memory_used=12 * GIB,
        memory_total=16 * GIB,
        power_watts=69.5,
    )
    assert second == GpuUse(index=1, name="GPU 101", memory_used=12 * GIB, memory_total=16 * GIB)


@pytest.mark.parametrize("function", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2"])
def test_a_driver_that_does_not_answer_is_named(function: str) -> None:
    with pytest.raises(NvmlError, match=f"{function} of libnvidia-ml.so.1 answered with error 9"):
        Nvml(Library(fails=function)).read()


def test_a_machine_without_a_driver_has_no_gpus() -> None:
    def load(_: str) -> Any:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    assert find_provider({}, load).read() == ()
