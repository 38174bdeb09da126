"""Moto's state in a folder: what comes back, what is refused, and what is not written."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from moto.backends import get_backend
from moto.core.base_backend import BackendDict

from gpucost.rehearsal.services import memory
from gpucost.rehearsal.services.memory import Memory, ec2_backend

ACCOUNT = "123456789012"
REGION = "us-east-1"


def forget() -> None:
    """The process ends: everything that moto holds is gone."""
    BackendDict.reset()
    memory._BORN.clear()


@pytest.fixture(autouse=True)
def _a_process_of_its_own() -> Iterator[None]:
    forget()
    yield
    forget()


def queues(region: str = REGION) -> Any:
    return get_backend("sqs")[ACCOUNT][region]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def make_template(backend: Any, name: str) -> str:
    return str(backend.create_launch_template(name, "", {"ImageId": "ami-1"}, {}).id)


def test_ec2_is_born_the_same_every_time_and_ids_made_later_differ() -> None:
    def ids() -> tuple[set[str], str]:
        backend = ec2_backend(REGION)
        born = {
            *backend.vpcs,
            *backend.snapshots,
            *backend.amis,
            *(s.id for s in backend.get_default_subnets().values()),
        }
        return born, make_template(backend, "one")

    born, template = ids()
    forget()
    assert ids()[0] == born
    forget()
    assert ids()[1] != template
    forget()
    assert not {*ec2_backend("us-west-2").vpcs} & born


def test_templates_come_back_in_a_small_snapshot(tmp_path: Path) -> None:
    folder = tmp_path / "moto"
    backend = ec2_backend(REGION)
    whole = len(pickle.dumps(backend))
    made = make_template(backend, "one")
    Memory(folder).keep("ec2", REGION)
    (path,) = folder.iterdir()
    assert path.stat().st_size < whole / 5, "the images that EC2 is born with are not in it"
    forget()
    Memory(folder).take_up()
    back = ec2_backend(REGION)
    assert back.get_launch_template(made).ec2_backend is back
    assert back.get_launch_template(made).latest_version().data == {"ImageId": "ami-1"}
    assert all(image.ec2_backend is back for image in back.amis.values())
    assert set(back.snapshots) == {image.ebs_snapshot.id for image in back.amis.values()}


def test_a_queue_comes_back_with_its_messages_and_works(tmp_path: Path) -> None:
    queues().create_queue("one", tags={})
    queues().send_message("one", "hello")
    dead = queues().create_queue("dead", tags={})
    queues().create_queue("two", tags={}, RedrivePolicy={"deadLetterTargetArn": dead.queue_arn, "maxReceiveCount": 2})
    Memory(tmp_path / "moto").keep("sqs", REGION)
    forget()
    Memory(tmp_path / "moto").take_up()
    (message,) = queues().receive_message("one", 1, 0, 30)
    assert message.body == "hello"
    queues().delete_message("one", message.receipt_handle)
    assert queues().get_queue("two").dead_letter_queue is queues().get_queue("dead")
    assert isinstance(queues().get_queue("one")._messages_lock, threading.Condition)


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "moto"
    kept = Memory(folder)
    queues().create_queue("one", tags={})
    queues("us-west-2").create_queue("two", tags={})
    ec2_backend(REGION)
    kept.keep("sqs", REGION)
    (path,) = folder.iterdir()
    assert path.name == f"sqs.{ACCOUNT}.{REGION}.snapshot"
    first = path.stat()
    kept.keep("sqs", REGION)
    assert path.stat().st_ino == first.st_ino, "nothing changed: the file is the same"
    queues().send_message("one", "hello")
    kept.keep("sqs", REGION)
    assert path.stat().st_ino != first.st_ino
    kept.keep("sqs", None)
    assert files(folder) == {path.name, f"sqs.{ACCOUNT}.us-west-2.snapshot"}


def test_an_event_may_change_queues_everywhere_but_not_ec2(tmp_path: Path) -> None:
    queues("us-west-2").create_queue("two", tags={})
    ec2_backend(REGION)
    get_backend("events")[ACCOUNT][REGION].put_rule(name="one", event_pattern='{"source": ["aws.ec2"]}')
    Memory(tmp_path / "moto").keep("events", REGION)
    services = {name.split(".")[0] for name in files(tmp_path / "moto")}
    assert services == {"events", "sqs"}


def test_makers_of_defaults_come_back(tmp_path: Path) -> None:
    """Moto's SSM keeps parameters in a dict whose maker of defaults is a function within a function."""
    parameters = get_backend("ssm")[ACCOUNT][REGION]._parameters
    parameters["/one"].append("hello")
    Memory(tmp_path / "moto").keep("ssm", REGION)
    forget()
    Memory(tmp_path / "moto").take_up()
    back = get_backend("ssm")[ACCOUNT][REGION]._parameters
    assert back["/one"] == ["hello"]
    assert back["/two"] == []


def test_what_cannot_be_written_is_said_once_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    queues().made_here = lambda: None
    kept = Memory(tmp_path / "moto")
    kept.keep("sqs", REGION)
    kept.keep("sqs", REGION)
    assert caplog.text.count("sqs in us-east-1 will not be there after a restart") == 1
    assert files(tmp_path / "moto") == set()


def test_no_folder_no_memory(tmp_path: Path) -> None:
    queues().create_queue("one", tags={})
    Memory(None).keep("sqs", REGION)
    Memory(None).take_up()
    assert files(tmp_path) == set()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"format": 1, "moto": "4.0.0"}\n', r"pip install moto==4\.0\.0\), or use another --state-dir"),
        (b'{"format": 0}\n', "use another --state-dir"),
        (b"\x80\x05K\x01.", "is not a snapshot of moto's state"),
    ],
)
def test_other_snapshots_are_refused_unread(tmp_path: Path, content: bytes, sentence: str) -> None:
    folder = tmp_path / "moto"
    kept = Memory(folder)
    (folder / f"sqs.{ACCOUNT}.{REGION}.snapshot").write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        kept.take_up()


def test_a_cut_snapshot_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "moto"
    queues().create_queue("one", tags={})
    Memory(folder).keep("sqs", REGION)
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match="remove it to begin without sqs's state in us-east-1"):
        Memory(folder).take_up()


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "moto"
    folder.mkdir()
    folder.chmod(0o770)
    with pytest.raises(ValueError, match=r"mode 770, expected .* with 700.*chmod 700"):
        Memory(folder)
