"""Do programs end with the same weights, bit for bit, however often they are killed?

    python -m benchmarks.survival --runs 20 --kills 30 [--program digits] [--processes 2] [--store folder]

Each run trains a job on a real object store, on one machine after another: each is switched off by SIGKILL in a moment
drawn at random (in a step, a save, an upload, a restore, its start), and some are warned by SIGTERM. The last one ends
the job; its weights, results, every loss and every logged metric are compared with those of a run that nobody
disturbed. Shuffled, with 2 workers that load data, and 2 micro-steps to a step.

Left out, `--program`, `--processes` and `--store` mean each of both. One row of the table is printed as soon as it is
known. `--first` and `--runs` make parts of a long series: run number n meets the same moments in any of them. `--boot`
uses the real agent and torchrun instead of forked programs: ten times slower. The exit status is 1 when a run failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import boto3

from benchmarks.survival_nodes import Booted, Forked, Node, Pipe, Zygote, watched
from benchmarks.survival_recorder import PART_BYTES, PIPE, SLOW
from benchmarks.survival_run import Report, Training, Typical, spec_of
from gpucost.bundle import pack_agent, pack_code
from gpucost.job import CheckpointPlan, JobId
from gpucost.jobstore import JobStore
from gpucost.objects import Objects
from gpucost.recipe import Recipe
from gpucost.training.workdir import Workdir

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "include" / "programs"
SEED = 7
PLAIN = ("PATH", "HOME", "LANG", "TMPDIR", "LD_LIBRARY_PATH")
HEADER = (
    "| program | processes | store | runs | equal | kills | in step | save | upload | restore | start or end "
    "| one rank first | most steps lost | warnings | steps lost | longest exit s | seconds |"
)


@dataclass(frozen=True)
class Combination:
    """What a series of runs has in common."""

    program: str
    processes: int
    store: str
    every_steps: int = 4

    @property
    def name(self) -> str:
        """For folders and keys."""
        return f"{self.program}-{self.processes}-{self.store}"


@dataclass
class Bed:
    """What all runs stand on.

    Args:
        folder: for everything that they write.
        environ: of a machine, with its way to the S3 server if there is one.
        boot: whether machines run the real agent.
        slow_ms: what each write to the store takes longer.
        accumulate: micro-steps to a step.
        workers: processes that load data, per rank.
        programs: the folder of the programs' folders.
    """

    folder: Path
    environ: dict[str, str]
    boot: bool = False
    slow_ms: float = 6.0
    accumulate: int = 2
    workers: int = 2
    programs: Path = PROGRAMS

    def objects(self, store: str) -> tuple[Objects, dict[str, str]]:
        """The store, and how a machine finds it."""
        if store == "folder":
            url, endpoint = (self.folder / "store").as_uri(), ""
        else:
            url, endpoint = self.environ["SURVIVAL_S3"], self.environ["SURVIVAL_S3_ENDPOINT"]
        found = {"GPUCOST_STORE_URL": url, "GPUCOST_STORE_ENDPOINT": endpoint, "GPUCOST_STORE_REGION": "us-east-1"}
        session = boto3.Session(
            aws_access_key_id=self.environ.get("AWS_ACCESS_KEY_ID"),
            aws_secret_access_key=self.environ.get("AWS_SECRET_ACCESS_KEY"),
            region_name="us-east-1",
        )
        return Objects.open(url, endpoint=endpoint or None, session=session), found

    def arguments(self, program: str) -> tuple[str, ...]:
        """Of a run of some two hundred short steps."""
        if program == "digits":
            return ("--epochs", "6", "--batch-size", "64")
        if program != "ctr":
            return ()
        small = ("--buckets", "64", "--width", "4", "--workers", "2")
        return ("--data", str(self._clicks()), "--epochs", "2", "--batch-size", "64", *small)

    def _clicks(self) -> Path:
        file = self.folder / "clicks.tsv"
        if not file.exists():
            command = [sys.executable, str(PROGRAMS / "ctr" / "generate.py"), str(file), "--rows", "5000"]
            subprocess.run(command, check=True, env=self.environ, stdout=subprocess.DEVNULL)
        return file


class Series:
    """Runs of one combination.

    Args:
        bed: what they stand on.
        what: the combination.
    """

    def __init__(self, bed: Bed, what: Combination) -> None:
        self._bed = bed
        self._what = what
        self._objects, self._where = bed.objects(what.store)
        self._arguments = bed.arguments(what.program)
        self._typical = Typical()
        self._agent = bed.folder / f"agent-{what.name}.zip"
        self._code = ("0" * 64, b"")
        if bed.boot:
            watched(bed.programs / what.program, "train.py", code := bed.folder / f"code-{what.name}")
            self._code = pack_code(code)
            self._agent.write_bytes(pack_agent().data)

    def run(
        self,
        *,
        first: int,
        runs: int,
        kills: int,
        warnings: int,
        seed: int,
        parallel: int,
        each: Callable[[Report], None],
    ) -> list[Report]:
        """The reports of all runs; `each` gets them one by one."""
        zygotes: SimpleQueue[Zygote] = SimpleQueue()
        for _ in range(parallel):
            zygotes.put(Zygote(self._bed.environ))
        with self._lent(zygotes) as zygote:
            training = self._training("undisturbed", zygote, random.Random(0), every_steps=10**6)  # noqa: S311
            expected = training.undisturbed()

        def one(number: int) -> Report:
            chance = random.Random(f"{seed} {self._what.name} {number}")  # noqa: S311 (no secrets)
            with self._lent(zygotes) as zygote:
                training = self._training(f"{self._what.name} run {number}", zygote, chance, self._what.every_steps)
                report = training.disturbed(kills, warnings, expected)
            each(report)
            return report

        try:
            with ThreadPoolExecutor(parallel) as pool:
                return list(pool.map(one, range(first, first + runs)))
        finally:
            while not zygotes.empty():
                zygotes.get().close()

    @contextlib.contextmanager
    def _lent(self, zygotes: SimpleQueue[Zygote]) -> Iterator[Zygote]:
        zygote = zygotes.get()
        try:
            yield zygote
        finally:
            zygotes.put(zygote)

    def _training(self, name: str, zygote: Zygote, chance: random.Random, every_steps: int) -> Training:
        job_id = JobId(dag_id="survival", run_id=name, task_id=self._what.program)
        store = JobStore(self._objects, job_id.key)
        spec = spec_of(
            job_id=job_id,
            program="watched.py" if self._bed.boot else "train.py",
            code_digest=self._code[0],
            arguments=self._arguments,
            seed=SEED,
            world_size=self._what.processes,
            recipe=Recipe(accumulate=self._bed.accumulate, workers=self._bed.workers),
            checkpoint=CheckpointPlan(every_steps=every_steps),
        )
        if self._bed.boot:
            store.write_code(*self._code)

        def start(attempt: int, workdir: Workdir, pipe: Pipe) -> Node:
            environ = self._where | {
                "GPUCOST_JOB": job_id.key,
                "GPUCOST_ATTEMPT": str(attempt),
                "GPUCOST_LEASE": f"lease-{attempt}",
                "GPUCOST_WORKDIR": str(workdir.path),
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:9/",
                PIPE: str(pipe.path),
                SLOW: str(self._bed.slow_ms),
                PART_BYTES: str(128 * 1024),
            }
            if self._bed.boot:
                return Booted(self._agent, workdir.path, self._bed.environ | environ)
            program = self._bed.programs / self._what.program / "train.py"
            return Forked(zygote, workdir.path, program, self._arguments, self._what.processes, environ)

        folder = self._bed.folder / name.replace(" ", "-")
        return Training(name, spec, store, folder, start, chance, self._typical)


@contextlib.contextmanager
def bed(*, s3: bool) -> Iterator[Bed]:
    """A folder, and a real S3 server if wanted; both gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="survival-"))
    environ = {name: os.environ[name] for name in PLAIN if name in os.environ}
    # As the agent gives it to programs; hashes and threads are part of what must not differ between machines.
    environ |= {"PYTHONHASHSEED": str(SEED), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environ["PYTHONPATH"] = str(ROOT / "plugins")
    try:
        with contextlib.ExitStack() as stack:
            yield Bed(folder, environ | (stack.enter_context(_server(folder)) if s3 else {}))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[dict[str, str]]:
    from demo.environment import BUCKET
    from demo.settings import StackSettings
    from demo.stack import Stack

    stack = Stack(StackSettings(home=folder / "stack", services=("s3",), any_ports=True))
    stack.up()
    try:
        keys = stack.credentials().node
        yield {
            "AWS_ACCESS_KEY_ID": keys.access_key,
            "AWS_SECRET_ACCESS_KEY": keys.secret_key,
            "SURVIVAL_S3": f"s3://{BUCKET}/survival",
            "SURVIVAL_S3_ENDPOINT": stack.addresses()["s3"],
        }
    finally:
        stack.down()


def row(what: Combination, reports: list[Report], seconds: float) -> str:
    """The combination's row of the table."""
    kills = sum((report.kills for report in reports), Counter())
    at = [kills[kind] for kind in ("step", "save", "upload", "restore")]
    return (
        f"| {what.program} | {what.processes} | {what.store} | {len(reports)} "
        f"| {sum(not report.problems for report in reports)} | {kills.total()} | {' | '.join(map(str, at))} "
        f"| {kills.total() - sum(at)} | {sum(report.rank_kills for report in reports)} "
        f"| {max(report.most_lost for report in reports)} | {sum(report.warnings for report in reports)} "
        f"| {max(report.warned_lost for report in reports)} "
        f"| {max(report.longest_exit for report in reports):.1f} | {seconds:.0f} |"
    )


def tell(line: str) -> None:
    """A line of the table, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--first", type=int, default=1, help="number of the first run")
    parser.add_argument("--kills", type=int, default=30, help="SIGKILLs per run")
    parser.add_argument("--warnings", type=int, default=5, help="SIGTERMs per run")
    parser.add_argument("--program", choices=("digits", "ctr"))
    parser.add_argument("--processes", type=int, choices=(1, 2))
    parser.add_argument("--store", choices=("s3", "folder"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=2, help="runs at once")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-steps to a step")
    parser.add_argument("--workers", type=int, default=2, help="processes that load data, per rank")
    parser.add_argument("--boot", action="store_true", help="real agent and torchrun")
    parser.add_argument("--slow-ms", type=float, default=6.0, help="each write to the store takes longer by this")
    return parser.parse_args()


def main() -> int:
    """Run what is asked for; 1 when a run failed."""
    args = parse_arguments()
    # The server and the machines are ended before this process is.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    combinations = [
        Combination(program, processes, store)
        for program in ([args.program] if args.program else ["digits", "ctr"])
        for processes in ([args.processes] if args.processes else [1, 2])
        for store in ([args.store] if args.store else ["s3", "folder"])
    ]
    lock, failed = threading.Lock(), False

    def each(report: Report) -> None:
        with lock:
            told = f"{report.name}: {dict(report.kills)}, {report.attempts} attempts, {report.seconds:.0f} s"
            sys.stderr.write("\n".join([told, *report.problems, ""]))

    with bed(s3=any(what.store == "s3" for what in combinations)) as stand:
        stand.boot, stand.slow_ms = args.boot, args.slow_ms
        stand.accumulate, stand.workers = args.accumulate, args.workers
        tell(HEADER)
        tell("|" + "---|" * HEADER.count(" |"))
        for what in combinations:
            began = time.monotonic()
            reports = Series(stand, what).run(
                first=args.first,
                runs=args.runs,
                kills=args.kills,
                warnings=args.warnings,
                seed=args.seed,
                parallel=args.parallel,
                each=each,
            )
            failed = failed or any(report.problems for report in reports)
            tell(row(what, reports, time.monotonic() - began))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
