"""Can a state be loaded again? It is tried when it is saved, without its tensors, so that no save is in vain."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

from gpucost.training.checkpoints.parts import PartReader
from gpucost.training.outage import brief


def check_loadable(state: dict[str, Any]) -> None:
    """Make sure that the state without its tensors, which always can be loaded, can be.

    Raises:
        ValueError: it cannot.
    """
    import torch

    buffer = io.BytesIO()
    try:
        torch.save(state, buffer, pickle_module=SimpleNamespace(__name__="pickle", Pickler=_HollowPickler))
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as refused:
        raise ValueError(
            f"state: it cannot be loaded again ({brief(refused)}); keep to tensors, numbers, text, lists and dicts"
            " in `extra` and in what state_dict() gives (float(x) instead of a numpy number)"
        ) from refused


class _HollowPickler(pickle.Pickler):
    """Writes an empty dict for each tensor."""

    def reducer_override(self, thing: Any) -> Any:
        import torch

        return (OrderedDict, ()) if type(thing) in (torch.Tensor, torch.nn.Parameter) else NotImplemented


def load(reader: PartReader) -> dict[str, Any]:
    """The state that is in the parts.

    Raises:
        TornCheckpoint: a part is missing or has another content.
        ValueError: all parts are whole, but torch refuses to load them.
        one of `store_errors()`: the store is away.
    """
    import torch

    try:
        state: dict[str, Any] = torch.load(reader, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
    except MemoryError:
        raise
    except Exception as refused:
        reader.check_rest()
        raise ValueError(
            f"a whole checkpoint cannot be loaded by torch {torch.__version__}: {brief(refused)}. "
            "It was saved by another version of torch or of a package: use the one that saved it, or start a new job"
        ) from refused
    reader.check_rest()
    return state
