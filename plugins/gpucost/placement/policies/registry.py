"""Policies by name, or somebody's own by dotted path; every one of them under the guard."""

from __future__ import annotations

from importlib import import_module

from gpucost.placement.policies.greedy import Greedy
from gpucost.placement.policies.guard import Guarded
from gpucost.placement.policies.protocol import Policy

BUILT_IN: dict[str, type[Policy]] = {"greedy": Greedy}


def make_policy(name: str) -> Guarded:
    """The policy called `name`, or the class at a dotted path such as `my_package.policies.Mine`.

    Raises:
        ValueError: there is none of that name, or nothing at that path.
    """
    if name in BUILT_IN:
        return Guarded(BUILT_IN[name]())
    module, _, attribute = name.rpartition(".")
    if module:
        try:
            return Guarded(getattr(import_module(module), attribute)())
        except (ImportError, AttributeError) as missing:
            raise ValueError(f"policy: nothing at {name!r} ({missing}); check the path and PYTHONPATH") from missing
    raise ValueError(f"policy: got {name!r}, expected one of {', '.join(BUILT_IN)}, or a dotted path to a class")
