"""What do the GPUs do? NVIDIA's driver library asked through ctypes, a script, or nothing where there is no GPU.

The library comes with every driver; the module `pynvml` would be one more thing that an image must hold, for the
same five calls. Their names and structures are those of the NVML API reference, stable since driver 390.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter

from gpucost.jobstore import GpuUse

LIBRARY = "libnvidia-ml.so.1"
NAME_BYTES = 96
SCRIPT = "GPUCOST_GPU_SCRIPT"


class GpuProvider(Protocol):
    """Tells what the GPUs do."""

    def read(self) -> tuple[GpuUse, ...]:
        """One row per GPU, at this moment."""
        ...


class NvmlError(RuntimeError):
    """The driver's library answered with an error."""


class NoGpus:
    """A machine without GPUs."""

    def read(self) -> tuple[GpuUse, ...]:
        """Nothing."""
        return ()


class Scripted:
    """Rows from a file, for tests, demonstrations and rehearsals.

    Args:
        path: JSON lines, or one JSON list, of rows; a row is a list of `GpuUse`. Each read gives the next row, the
            last one again and again.

    Raises:
        ValueError: the file holds no rows, or wrong ones.
    """

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        try:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            if len(rows) == 1 and isinstance(rows[0], list) and rows[0] and isinstance(rows[0][0], list):
                rows = rows[0]
        except json.JSONDecodeError:
            rows = json.loads(text)
        self._rows = TypeAdapter(list[tuple[GpuUse, ...]]).validate_python(rows)
        if not self._rows:
            raise ValueError(f"{SCRIPT}: {path} holds no rows, expected a list of GPUs a line")
        self._next = 0

    def read(self) -> tuple[GpuUse, ...]:
        """The next row."""
        row = self._rows[min(self._next, len(self._rows) - 1)]
        self._next += 1
        return row


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class Nvml:
    """NVIDIA's GPUs; what one of them does not tell, as a MIG part its utilization, is None.

    Args:
        library: libnvidia-ml, loaded.

    Raises:
        NvmlError: no driver answers.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._call("nvmlInit_v2")

    def read(self) -> tuple[GpuUse, ...]:
        """One row per GPU.

        Raises:
            NvmlError: the driver does not answer.
        """
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return tuple(self._use(index) for index in range(count.value))

    def _use(self, index: int) -> GpuUse:
        device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
        name = ctypes.create_string_buffer(NAME_BYTES)
        use, memory, milliwatts = _Utilization(), _Memory(), ctypes.c_uint()
        named = self._tells("nvmlDeviceGetName", device, name, ctypes.c_uint(NAME_BYTES))
        used = self._tells("nvmlDeviceGetUtilizationRates", device, ctypes.byref(use))
        remembers = self._tells("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        powered = self._tells("nvmlDeviceGetPowerUsage", device, ctypes.byref(milliwatts))
        return GpuUse(
            index=index,
            name=name.value.decode(errors="replace") if named else "",
            utilization_percent=float(use.gpu) if used else None,
            memory_used=memory.used if remembers else None,
            memory_total=memory.total if remembers else None,
            power_watts=milliwatts.value / 1000 if powered else None,
        )

    def _tells(self, function: str, *arguments: Any) -> bool:
        return bool(getattr(self._library, function)(*arguments) == 0)

    def _call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code != 0:
            raise NvmlError(f"{function} of {LIBRARY} answered with error {code}")


def find_provider(environ: Mapping[str, str], load: Callable[[str], Any] = ctypes.CDLL) -> GpuProvider:
    """The provider for this machine: a script if `GPUCOST_GPU_SCRIPT` names one, NVML if there is a driver, or none.

    Raises:
        OSError, ValueError: the script cannot be read.
        NvmlError: there is a driver's library, but no driver answers.
    """
    if script := environ.get(SCRIPT):
        return Scripted(Path(script))
    try:
        library = load(LIBRARY)
    except OSError:
        return NoGpus()
    return Nvml(library)
