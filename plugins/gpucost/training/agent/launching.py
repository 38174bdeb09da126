"""What is started for a job: which command, with which environment?"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpucost.jobstore import JobSpec
from gpucost.training.workdir import Workdir

_SET_BY_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def command(spec: JobSpec, arguments: Sequence[str] | None = None, python: str = sys.executable) -> list[str]:
    """What starts the program on this node: itself where it is one process, else torchrun's launcher.

    Args:
        spec: the job.
        arguments: the program's, where they are not the job's as they are.
        python: the interpreter.
    """
    program = [spec.program, *(spec.arguments if arguments is None else arguments)]
    if spec.world_size == 1:
        return [python, *program]
    return [python, "-m", "gpucost.training.agent.launch", str(spec.world_size), *program]


def environment(
    spec: JobSpec, base: Mapping[str, str], workdir: Workdir, package_root: Path, port: int
) -> dict[str, str]:
    """The program's environment.

    Args:
        spec: threads and seed come from the job, so that a resumed run computes as the first one did.
        base: the agent's environment, and what else the program is to be told.
        workdir: shared with the program.
        package_root: a folder or zip from which `import gpucost` works.
        port: a free one, where processes would meet; torchrun takes its own.
    """
    # gpucost first, so that nothing takes its place; then what the job brings, in place of what the image has.
    path = os.pathsep.join(filter(None, [str(package_root), str(workdir.site), base.get("PYTHONPATH", "")]))
    threads = str(spec.threads)
    return {
        **{name: value for name, value in base.items() if name not in _SET_BY_TORCHRUN},
        "PYTHONPATH": path,
        "PYTHONHASHSEED": str(spec.seed),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",  # SIGABRT then makes every python process write its stacks.
        "GPUCOST_WORKDIR": str(workdir.path),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Without it cuBLAS has no deterministic algorithm; see torch.use_deterministic_algorithms.
        "CUBLAS_WORKSPACE_CONFIG": base.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
        **({"CUDA_VISIBLE_DEVICES": ""} if spec.gpu_count == 0 else {}),
        **(_alone(port) if spec.world_size == 1 else {}),
    }


def _alone(port: int) -> dict[str, str]:
    # As torchrun would, so that a program written for several processes also runs as one.
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
