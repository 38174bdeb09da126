"""How is one method of one object replaced? By a class of its own, as torch's parametrizations do it.

An attribute would be copied with a deep copy of the object (a moving average of the weights), which would then compute
with the original, and would become part of a scheduler's state_dict.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def override(thing: Any, name: str, method: Callable[..., Any]) -> None:
    """Call `method(original, thing, ...)` in place of the method `name`.

    Args:
        thing: changed in place; its class keeps its name.
        name: of the method.
        method: gets the class's own method, the object (or a copy of it), and the arguments.
    """
    kind = type(thing)
    original = getattr(kind, name)

    @functools.wraps(original)
    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(original, self, *args, **kwargs)

    thing.__class__ = type(kind.__name__, (kind,), {name: replaced, "__module__": kind.__module__})
