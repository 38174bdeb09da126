"""What runs in each process of a training with several? The user's program, and a word when it fails.

`python -m gpucost.training.agent.rank LAUNCHER train.py args` is `python train.py args`, except that it dies with
its launcher (process LAUNCHER), and that an exception which nobody catches is also left in the work folder, with
the moment: where one process fails, others fail a moment later because of it, and only the moment tells which is
which.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType, TracebackType

from gpucost.training.workdir import Failure, Workdir

PR_SET_PDEATHSIG = 1
TRACEBACK_CHARACTERS = 8000


def main() -> None:
    """Run the program that the command line names."""
    launcher, program, *arguments = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):
        os._exit(1)  # It died before this process was tied to it.
    sys.excepthook = _on_exception
    try:
        _run(program, arguments)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            _leave(leaving.code if isinstance(leaving.code, int) else 1, "")
        raise


def _run(program: str, arguments: list[str]) -> None:
    # As python itself does it: the program is the module __main__, which pickle and multiprocessing look for.
    module = ModuleType("__main__")
    path = Path(program)
    module.__dict__.update(__file__=program, __builtins__=__builtins__, __spec__=None, __loader__=None)
    sys.modules["__main__"] = module
    sys.argv = [program, *arguments]
    sys.path[0] = str(path.absolute().parent)
    exec(compile(path.read_bytes(), program, "exec"), module.__dict__)  # noqa: S102


def _on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    trace = _own(trace)
    error.__traceback__ = trace
    text = "".join(traceback.format_exception(kind, error, trace))
    _leave(1, text[-TRACEBACK_CHARACTERS:])
    sys.stderr.write(text)
    sys.stderr.flush()


def _own(trace: TracebackType | None) -> TracebackType | None:
    # The program's own frames: those of this module, and of what started it, would only be in the way.
    own, rest = trace, trace
    while rest is not None:
        if rest.tb_frame.f_code.co_filename == __file__:
            own = rest.tb_next
        rest = rest.tb_next
    return own


def _leave(code: int, text: str) -> None:
    failure = Failure(rank=int(os.environ["RANK"]), exit_code=code & 0xFF, at=time.time(), traceback=text)
    try:
        Workdir(Path(os.environ["GPUCOST_WORKDIR"])).write_rank_failure(failure)
    except OSError as error:  # A full disk, above all. The traceback is in the log all the same.
        sys.stderr.write(f"gpucost: rank {failure.rank} cannot leave word of its failure: {error}\n")


if __name__ == "__main__":
    main()
