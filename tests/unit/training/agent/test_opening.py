"""What keeps an attempt from beginning is told with its reason, and a stop does not wait for a download."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpucost.bundle import pack_code
from gpucost.job import JobId
from gpucost.jobstore import AttemptRecord, FencedOut, JobSpec, JobStore, Member
from gpucost.objects import Objects
from gpucost.reasons import Reason
from gpucost.training.agent import fetch, opening
from gpucost.training.agent.identity import Identity
from gpucost.training.agent.opening import Preparing, Refused
from gpucost.training.workdir import Workdir

NOW = datetime(2026, 11, 30, tzinfo=UTC)
ME = Identity("job", "l-1", 1)


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text("print(1)\n")
    digest, data = pack_code(code)
    store = JobStore(Objects.in_memory(), "job")
    store.write_code(digest, data)
    job_id = JobId(dag_id="d", run_id="r", task_id="t")
    store.write_spec(JobSpec(job_id=job_id, name="t", code_digest=digest, program="train.py", world_size=2))
    return store


def attempt(store: JobStore, *leases: str) -> None:
    members = tuple(Member(lease_id=lease, rank=rank) for rank, lease in enumerate(leases))
    store.write_attempt(AttemptRecord(number=1, members=members, created_at=NOW, expires_at=NOW))


def test_several_processes_on_one_node_are_fine_and_several_nodes_are_refused(store: JobStore) -> None:
    attempt(store, "l-1")
    assert opening.read(store, ME)[0].world_size == 2
    attempt(store, "l-1", "l-2")
    with pytest.raises(Refused, match="members: got 2 leases; this version trains on one node"):
        opening.read(store, ME)


def test_documents_that_are_missing_wrong_or_another_nodes_are_refused(store: JobStore) -> None:
    with pytest.raises(Refused, match=r"attempt\.json"):
        opening.read(store, ME)
    attempt(store, "l-9")
    with pytest.raises(Refused, match="lease l-1 is no member"):
        opening.read(store, ME)
    store.objects.put(f"{store.root}/spec.json", b'{"name": 3}')
    with pytest.raises(Refused, match="documents in the store are wrong") as refused:
        opening.read(store, ME)
    assert refused.value.reason is Reason.BAD_REQUEST


def test_other_code_than_the_jobs_is_refused(store: JobStore, tmp_path: Path) -> None:
    spec = store.spec()
    opening.prepare(store, spec, Workdir(tmp_path / "node"), {})
    assert (tmp_path / "node" / "code" / "train.py").read_text() == "print(1)\n"
    store.write_code(spec.code_digest, b"something else")
    with pytest.raises(Refused, match="code: got a zip with digest"):
        opening.prepare(store, spec, Workdir(tmp_path / "node"), {})


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), Reason.DISK_FULL),
        (fetch.CannotFetch(Reason.NOT_AUTHORIZED, "data.train: not allowed"), Reason.NOT_AUTHORIZED),
    ],
)
def test_what_cannot_be_fetched_is_refused_with_its_reason(
    store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: Reason
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(fetch, "fetch_data", fail)
    with pytest.raises(Refused) as refused:
        opening.prepare(store, store.spec(), Workdir(tmp_path / "node"), {})
    assert refused.value.reason is reason


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Refused(Reason.DISK_FULL, "full"), Reason.DISK_FULL),
        (FencedOut("attempt 2 owns the job"), Reason.FENCED),
        (ConnectionError("refused"), Reason.STORE_UNREACHABLE),
        (KeyError("x"), Reason.BAD_REQUEST),
    ],
)
def test_a_failure_in_its_thread_is_told(error: Exception, reason: Reason) -> None:
    def work() -> None:
        raise error

    preparing = Preparing(work, patience=0)
    preparing.join(10)
    assert preparing.exit_code() == 0
    assert preparing.refused is not None
    assert preparing.refused.reason is reason


def test_it_is_left_alone_when_the_node_must_go() -> None:
    go_on = threading.Event()

    def wait() -> None:
        go_on.wait(30)

    preparing = Preparing(wait, patience=0)
    assert preparing.exit_code() is None
    preparing.ask_to_end()
    assert preparing.exit_code() == 0
    assert preparing.refused is None
    go_on.set()
    preparing.join(10)


def test_a_work_folder_that_the_program_removed_has_the_room_of_the_disk_below(tmp_path: Path) -> None:
    assert not opening.has_no_room(tmp_path / "gone" / "deeper")
