"""A process table that exists in memory only."""

import signal
from dataclasses import dataclass, field

from demo.processes import ProcessInfo


@dataclass
class FakeProcesses:
    """Processes die of SIGKILL, and of SIGTERM unless they are stubborn."""

    living: dict[int, ProcessInfo] = field(default_factory=dict)
    marks: dict[int, str] = field(default_factory=dict)
    stubborn: set[int] = field(default_factory=set)
    signals: list[tuple[int, int]] = field(default_factory=list)

    def add(self, pid, *, parent=1, session=None, started=None, mark=None):
        self.living[pid] = ProcessInfo(pid, parent, session or pid, started or f"boot:{pid}")
        if mark:
            self.marks[pid] = mark

    def info(self, pid):
        return self.living.get(pid)

    def all(self):
        return list(self.living.values())

    def mark(self, pid):
        return self.marks.get(pid)

    def signal(self, pid, number):
        self.signals.append((pid, number))
        if number == signal.SIGKILL or pid not in self.stubborn:
            self.living.pop(pid, None)
