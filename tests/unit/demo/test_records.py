"""services.json, and secrets that only their owner can read."""

import stat
from pathlib import Path

import pytest

from demo.credentials import SecretFiles
from demo.records import RecordFile, ServiceRecord, StackRecord, write_private
from demo.settings import StackError


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_what_was_written_is_read_again(tmp_path):
    file = RecordFile(tmp_path / "services.json")
    service = ServiceRecord(
        pid=7,
        started="boot:1",
        started_at=1.5,
        fingerprint="f",
        stop_grace=2.0,
        stop_signal=2,
        stop_wave=1,
        leftovers=("/x",),
    )
    record = StackRecord(ports={"s3": 8333}, services={"s3": service})
    file.write(record)
    assert file.read() == record
    assert [path.name for path in tmp_path.iterdir()] == ["services.json"]


def test_without_a_file_there_is_an_empty_record_with_a_new_id(tmp_path):
    file = RecordFile(tmp_path / "services.json")
    assert file.read().services == {}
    assert file.read().stack_id != file.read().stack_id


def test_a_damaged_file_is_an_error_that_says_what_to_do(tmp_path):
    path = tmp_path / "services.json"
    path.write_text('{"services": {"s3": {"pid": "x"}}}')
    with pytest.raises(StackError, match=r"services\.json cannot be read .* remove the file"):
        RecordFile(path).read()


def test_a_file_that_is_no_text_is_an_error_that_says_what_to_do(tmp_path):
    path = tmp_path / "services.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(StackError, match=r"services\.json cannot be read .* remove the file"):
        RecordFile(path).read()


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "services.json"
    write_private(path, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_private(path, "new")
    assert [found.name for found in tmp_path.iterdir()] == ["services.json"]
    assert path.read_text() == "old"


@pytest.mark.parametrize("content", [b'{"jwt_secret": "hunter2"', b'{"jwt_secret": ["hunter2"]}', b"\xffhunter2"])
def test_damaged_secrets_are_named_and_not_shown(tmp_path, content):
    (tmp_path / "stack.json").write_bytes(content)
    with pytest.raises(StackError, match=r"stack\.json is damaged: .* remove the file") as failure:
        SecretFiles(tmp_path).load()
    assert "hunter2" not in str(failure.value)
    assert failure.value.__suppress_context__


def test_private_files_are_private_also_when_they_replace_an_open_one(tmp_path):
    path = tmp_path / "secret"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new")
    assert (path.read_text(), mode(path)) == ("new", 0o600)


def test_secrets_are_made_once_and_no_other_user_can_read_them(tmp_path):
    folder = tmp_path / "secrets"
    first = SecretFiles(folder).load()
    assert SecretFiles(folder).load() == first
    assert mode(folder) == 0o700
    assert {mode(path) for path in folder.iterdir()} == {0o600}
    assert {path.name for path in folder.iterdir()} == {"s3.json", "node.json", "passwords.json", "stack.json"}


def test_every_stack_has_secrets_of_its_own_and_does_not_print_them(tmp_path):
    one, other = SecretFiles(tmp_path / "one").load(), SecretFiles(tmp_path / "other").load()
    assert not set(one.values()) & set(other.values())
    assert not any(secret in repr(one) for secret in one.values())
