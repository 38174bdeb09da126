"""Which volumes are there? Those that are made with instances; some outlive theirs."""

from __future__ import annotations

import hashlib
from datetime import datetime

from gpucost.rehearsal.book.records import Disk, Instance


def volume_id(instance_id: str, device: str) -> str:
    """The id of the volume that was made with an instance as `device`: always the same."""
    return f"vol-{hashlib.sha256(f'{instance_id}/{device}'.encode()).hexdigest()[:17]}"


def deleted_at(one: Instance, disk: Disk) -> datetime | None:
    """When the volume was deleted: by its owner, or with its instance; None while it exists."""
    by_owner = one.deleted_volumes.get(disk.device)
    if by_owner is not None:
        return by_owner
    # `gone` is also set while an instance is stopped: its disks are still there
    return one.gone if one.state == "terminated" and disk.delete_on_termination else None
