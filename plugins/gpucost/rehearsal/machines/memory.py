"""How much memory may a machine use? Its type's, or less on a small host; what takes more is killed.

What this cannot do: it looks about once in a real second, so a burst between two looks goes unnoticed, and a
program that grows fast takes the host's memory until the next look. A kernel's memory cgroup would refuse the very
page, but needs rights that a newcomer's machine does not give. GPU memory is not counted at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gpucost.rehearsal.machines.processes import Process, pss

MIB = 2**20


class MemoryLimit:
    """Chooses whom the kernel's out-of-memory killer would choose.

    Args:
        mib_of: an instance type's memory, MiB; None for a type without that figure.
        most_mib: no machine gets more, whatever its type; None for no such cap.
        pss_of: bytes of one process, with what is shared split between those who share it; None when it is gone.
    """

    def __init__(
        self,
        mib_of: Callable[[str], int | None],
        most_mib: int | None = None,
        pss_of: Callable[[int], int | None] = pss,
    ) -> None:
        self._mib_of = mib_of
        self._most_mib = most_mib
        self._pss_of = pss_of
        self._kept: dict[str, int | None] = {}

    def limit_mib(self, instance_type: str) -> int | None:
        """What a machine of this type may use, MiB; None for as much as there is."""
        if instance_type not in self._kept:
            figures = [mib for mib in (self._mib_of(instance_type), self._most_mib) if mib is not None]
            self._kept[instance_type] = min(figures, default=None)
        return self._kept[instance_type]

    def victim(self, instance_type: str, processes: Mapping[int, Process], init: int | None) -> Process | None:
        """The largest process of a machine that uses more than it has, never its init; None when all is well."""
        limit = self.limit_mib(instance_type)
        # what is shared counts once for each process here: only when even this is too much, look closer, which is dear
        if limit is None or sum(one.rss for one in processes.values()) <= limit * MIB:
            return None
        shares = {pid: self._pss_of(pid) or 0 for pid in processes}
        if sum(shares.values()) <= limit * MIB:
            return None
        candidates = [pid for pid in processes if pid != init]
        return processes[max(candidates, key=lambda pid: shares[pid])] if candidates else None
