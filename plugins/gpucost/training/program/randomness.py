"""Where do the random number generators of torch, numpy and python stand? Read and put back.

The states are turned into tensors and numbers, because `torch.load(weights_only=True)` refuses numpy's.
"""

from __future__ import annotations

import random
from typing import Any

from gpucost.training.program import processes
from gpucost.training.surroundings import Surroundings


def prepare(seed: int | None = None, *, deterministic: bool = True) -> None:
    """Make what follows repeatable, and meet the other processes, if any; call it before the model is made.

    Args:
        seed: for torch, numpy and python; None: the job's seed.
        deterministic: let torch use deterministic algorithms only, and fail where it has none.
    """
    import torch

    around = Surroundings.find()
    if around.spec:
        torch.set_num_threads(around.spec.threads)
    processes.join(around)
    seed_everything(around.seed if seed is None else seed)
    torch.use_deterministic_algorithms(deterministic)
    # It would fill all new memory, to make visible who reads what nobody wrote; a tenth of some programs' time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = not deterministic


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), numpy's global generator and python's."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture() -> dict[str, Any]:
    """The present states."""
    import numpy as np
    import torch

    _, keys, position, has_gauss, cached_gaussian = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": {
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached_gaussian),
        },
        "python": [version, list(internal), gauss_next],
    }


def restore(state: dict[str, Any]) -> None:
    """Put back what `capture` gave."""
    import numpy as np
    import torch

    torch.set_rng_state(state["torch"])
    # Another number of GPUs than when saved: what both have is restored.
    for device, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda_state, device)
    saved = state["numpy"]
    keys = saved["keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, saved["position"], saved["has_gauss"], saved["cached_gaussian"]))
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
