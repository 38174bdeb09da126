"""The same training, never interrupted: the yardstick that the demo's final weights are held against."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpucost.bundle import pack_agent, pack_code
from gpucost.job import CheckpointPlan, JobId
from gpucost.jobstore import AttemptRecord, JobSpec, JobStore, Member
from gpucost.objects import Objects

from . import processes


@dataclass
class Reference:
    """A training that runs on this machine beside the demo, through the same agent, on a folder instead of S3."""

    process: subprocess.Popen[bytes]
    store: JobStore

    def digest(self, timeout: float) -> str:
        """The digest of its final weights.

        Raises:
            RuntimeError: it did not end well; says why.
        """
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired as late:
            raise RuntimeError(f"the uninterrupted training did not finish within {timeout:.0f} s") from late
        record = self.store.exit_record(1)
        if record is None or record.weights_digest is None:
            raise RuntimeError(f"the uninterrupted training did not finish: {record.message if record else 'no word'}")
        return record.weights_digest

    def stop(self) -> None:
        """End it, if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(30)


def start_reference(
    folder: Path, code: Path, arguments: tuple[str, ...], python: Path, seed: int = 0, *, stack_id: str
) -> Reference:
    """Start the training `code` with `arguments` below `folder`, which must be empty.

    Args:
        stack_id: the mark by which the next `up` or `down` finds it, should this process be killed.
    """
    objects = Objects.open((folder / "store").absolute().as_uri())
    job_id = JobId(dag_id="demo", run_id=folder.name, task_id="reference")
    store = JobStore(objects, job_id.key)
    digest, data = pack_code(code)
    store.write_code(digest, data)
    store.write_spec(
        JobSpec(
            job_id=job_id,
            name="reference",
            code_digest=digest,
            program="train.py",
            arguments=arguments,
            seed=seed,
            gpu_count=0,
            checkpoint=CheckpointPlan(every_steps=10_000),
        )
    )
    now = datetime.now(UTC)
    members = (Member(lease_id="reference"),)
    store.write_attempt(AttemptRecord(number=1, members=members, created_at=now, expires_at=now + timedelta(hours=1)))
    store.claim(1)
    agent = folder / "agent.zip"
    agent.write_bytes(pack_agent().data)
    environment = {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "HOME": str(folder),
        "AWS_EC2_METADATA_DISABLED": "true",
        "GPUCOST_STORE_URL": (folder / "store").absolute().as_uri(),
        "GPUCOST_STORE_ENDPOINT": "",
        "GPUCOST_STORE_REGION": "",
        "GPUCOST_JOB": job_id.key,
        "GPUCOST_LEASE": "reference",
        "GPUCOST_ATTEMPT": "1",
        processes.MARK: stack_id,
    }
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen([python, agent], cwd=folder, env=environment, stdout=log, stderr=log)
    return Reference(process, store)
