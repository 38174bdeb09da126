"""How busy is the node? One sample for each heartbeat: GPUs, CPU, memory and disk, from what Linux tells.

A container's limit of memory, where it is smaller than the machine's memory, is what counts: that is where the
program is ended.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from gpucost.jobstore import GpuUse, Telemetry
from gpucost.training.agent.nvml import GpuProvider, NvmlError, find_provider
from gpucost.training.agent.say import say

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


class Sampler:
    """Takes samples; what cannot be read is left out, and said once until it can be read again.

    Args:
        environ: names the folder that the program works in (`GPUCOST_WORKDIR`), and the GPUs' script, if any.
        provider: of the GPUs; None: the one that fits this machine, looked for at the first sample.
        folder: whose disk is looked at; None: as `environ` says.
        proc: where Linux tells of CPU and memory.
        cgroup: where it tells of limits, version 2.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        provider: GpuProvider | None = None,
        *,
        folder: Path | None = None,
        proc: Path = PROC,
        cgroup: Path = CGROUP,
    ) -> None:
        self._environ = environ
        self._provider = provider
        self._folder = folder or Path(environ.get("GPUCOST_WORKDIR") or ".")
        self._proc = proc
        self._cgroup = cgroup
        self._cpu: tuple[int, int] | None = None
        self._failing = False

    def sample(self) -> Telemetry:
        """What the node does now; of the CPU, since the sample before."""
        memory = self._memory()
        return Telemetry(
            gpus=self._gpus(),
            cpu_percent=self._cpu_percent(),
            memory_used=memory[0] if memory else None,
            memory_total=memory[1] if memory else None,
            disk_free=self._disk_free(),
        )

    def _gpus(self) -> tuple[GpuUse, ...]:
        try:
            self._provider = self._provider or find_provider(self._environ)
            gpus = self._provider.read()
        except (NvmlError, OSError, ValueError, AttributeError) as error:  # AttributeError: an older library.
            if not self._failing:
                say(f"GPU telemetry: {error}; left out until it works")
            self._failing = True
            return ()
        self._failing = False
        return gpus

    def _cpu_percent(self) -> float | None:
        before, self._cpu = self._cpu, cpu_ticks(self._proc / "stat")
        if before is None or self._cpu is None or self._cpu[1] <= before[1]:
            return None
        busy, total = self._cpu[0] - before[0], self._cpu[1] - before[1]
        return round(min(100.0, max(0.0, 100 * busy / total)), 1)

    def _memory(self) -> tuple[int, int] | None:
        machine = machine_memory(self._proc / "meminfo")
        group = group_memory(self._proc / "self" / "cgroup", self._cgroup)
        return min(filter(None, (machine, group)), key=lambda used_total: used_total[1], default=None)

    def _disk_free(self) -> int | None:
        try:
            return shutil.disk_usage(self._folder).free
        except OSError:
            return None


def cpu_ticks(stat: Path) -> tuple[int, int] | None:
    """Busy ticks and all ticks of all cores since the machine's start; see proc_stat(5)."""
    words = _read(stat).split("\n", 1)[0].split()
    if len(words) < 6 or words[0] != "cpu":
        return None
    # Time of guests, the 9th and 10th, is within that of users. Idle and waiting for a disk are the 4th and 5th.
    ticks = [int(word) for word in words[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def machine_memory(meminfo: Path) -> tuple[int, int] | None:
    """Bytes used, and in all; see proc_meminfo(5)."""
    kib = {line.split(":")[0]: int(line.split()[1]) for line in _read(meminfo).splitlines() if ":" in line}
    if "MemTotal" not in kib or "MemAvailable" not in kib:
        return None
    return (kib["MemTotal"] - kib["MemAvailable"]) * 1024, kib["MemTotal"] * 1024


def group_memory(own: Path, root: Path) -> tuple[int, int] | None:
    """Bytes used, and the limit, of the smallest limit that holds for this process; None without one.

    Args:
        own: /proc/self/cgroup.
        root: where version 2 of cgroup is mounted.
    """
    name = next((line[3:] for line in _read(own).splitlines() if line.startswith("0::")), None)
    if name is None:
        return None
    # A name with .. is one outside this container, whose own root is then the nearest that can be seen.
    group = root if ".." in name else root / name.strip("/")
    limits = []
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            break
        limit = _read(folder / "memory.max").strip()
        used = _read(folder / "memory.current").strip()
        if limit.isdigit() and used.isdigit():
            limits.append((max(0, int(used) - _cached(folder)), int(limit)))
    return min(limits, key=lambda used_total: used_total[1], default=None)


def _cached(group: Path) -> int:
    # Files that were read lately count as used, and are given back at once when memory is short; kubelet does alike.
    lines = _read(group / "memory.stat").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
