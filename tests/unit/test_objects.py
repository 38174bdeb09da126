"""Bytes behind a few calls: in memory and in a folder alike, two writers never both win."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from obstore.exceptions import GenericError

from gpucost.objects import Conflict, ObjectMissing, Objects, StoreError


@pytest.fixture(params=["memory", "folder"])
def objects(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    return Objects.in_memory() if request.param == "memory" else Objects.open(f"file://{tmp_path}/store")


def test_what_was_put_is_there_and_is_replaced(objects: Objects) -> None:
    objects.put("a/b.json", b"1")
    objects.put("a/b.json", b"22")
    assert objects.get("a/b.json") == b"22"


def test_what_is_not_there_is_named(objects: Objects) -> None:
    with pytest.raises(ObjectMissing, match="a/none"):
        objects.get("a/none")


def test_the_first_writer_of_a_new_object_wins(objects: Objects) -> None:
    objects.put_new("k", b"first")
    with pytest.raises(Conflict, match="k exists already"):
        objects.put_new("k", b"second")
    assert objects.get("k") == b"first"


def test_a_replacement_needs_the_version_that_was_read(objects: Objects) -> None:
    objects.put("k", b"one")
    _, etag = objects.get_with_etag("k")
    objects.put_if_match("k", b"two", etag)
    with pytest.raises(Conflict, match="k was changed by somebody else"):
        objects.put_if_match("k", b"three", etag)
    assert objects.get("k") == b"two"


def test_the_same_bytes_written_again_are_another_version(objects: Objects) -> None:
    objects.put("k", b"one")
    _, etag = objects.get_with_etag("k")
    objects.put("k", b"one")
    with pytest.raises(Conflict):
        objects.put_if_match("k", b"two", etag)


def test_what_was_deleted_is_not_replaced(objects: Objects) -> None:
    objects.put("k", b"one")
    _, etag = objects.get_with_etag("k")
    objects.delete(["k"])
    with pytest.raises(Conflict):
        objects.put_if_match("k", b"two", etag)
    with pytest.raises(ObjectMissing):
        objects.get("k")


def test_deleting_what_is_gone_is_no_error(objects: Objects) -> None:
    objects.put("a", b"")
    objects.delete(["a", "a", "b"])
    assert list(objects.scan("")) == []


def test_a_scan_shows_one_folder_with_sizes_and_versions(objects: Objects) -> None:
    objects.put("live/one.json", b"1")
    objects.put("live/two.json", b"22")
    objects.put("lively/three.json", b"333")
    found = {stat.key: stat for stat in objects.scan("live")}
    assert {key: stat.size for key, stat in found.items()} == {"live/one.json": 1, "live/two.json": 2}
    objects.put("live/one.json", b"3")
    again = {stat.key: stat.etag for stat in objects.scan("live")}
    assert again["live/one.json"] != found["live/one.json"].etag
    assert again["live/two.json"] == found["live/two.json"].etag


def test_a_scan_may_begin_after_a_key_whether_there_is_such_an_object_or_not(objects: Objects) -> None:
    for name in ("1.txt", "2.txt", "3.txt"):
        objects.put(f"log/{name}", b"")
    objects.put("zoo/1.txt", b"")
    for after, left in (("log/1.txt", {"log/2.txt", "log/3.txt"}), ("log/2~", {"log/3.txt"}), ("log/9", set())):
        assert {stat.key for stat in objects.scan("log", after)} == left


def test_of_many_who_count_at_once_none_is_lost(objects: Objects) -> None:
    objects.put("count", b"0")

    def count_up() -> None:
        done = 0
        while done < 10:
            data, etag = objects.get_with_etag("count")
            try:
                objects.put_if_match("count", str(int(data) + 1).encode(), etag)
            except Conflict:
                continue
            done += 1

    race([count_up] * 4)
    assert objects.get("count") == b"40"


def test_of_many_who_are_first_one_is(objects: Objects) -> None:
    won: list[int] = []

    def be_first(number: int) -> Callable[[], None]:
        def attempt() -> None:
            try:
                objects.put_new("first", str(number).encode())
            except Conflict:
                return
            won.append(number)

        return attempt

    race([be_first(number) for number in range(8)])
    assert len(won) == 1
    assert objects.get("first") == str(won[0]).encode()


@pytest.mark.parametrize("url", ["http://host/bucket", "bucket/prefix", "s3:///prefix", ""])
def test_another_address_is_refused_with_what_was_expected(url: str) -> None:
    with pytest.raises(ValueError, match=r"store: got .* expected s3://bucket/prefix or file:///folder"):
        Objects.open(url)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_bytes_can_be_put(objects: Objects, kind: Callable[[bytes], bytes]) -> None:
    objects.put("k", kind(b"some bytes"))
    assert objects.get("k") == b"some bytes"


def test_more_than_a_part_of_an_upload_is_one_object(objects: Objects) -> None:
    data = bytes(range(256)) * 4096 * 20
    objects.put("k", data)
    assert objects.get("k") == data
    assert [stat.size for stat in objects.scan("")] == [len(data)]


def test_a_deleted_folder_is_gone_and_its_neighbours_are_not(objects: Objects) -> None:
    for key in ("a/1", "a/b/2", "ab/3"):
        objects.put(key, b"")
    objects.delete_folder("a")
    objects.delete_folder("none")
    assert [stat.key for stat in objects.scan("")] == ["ab/3"]


def test_what_a_killed_writer_left_goes_with_its_folder(tmp_path: Path) -> None:
    objects = Objects.open(tmp_path.as_uri())
    objects.put("a/1", b"whole")
    (tmp_path / "a" / "2#1").write_bytes(b"ha")  # As obstore names what it has not finished.
    objects.delete_folder("a")
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_store_is_one_line_with_its_cause(tmp_path: Path) -> None:
    objects = Objects.open(tmp_path.as_uri())
    objects.put("file", b"")
    for call in (lambda: objects.put("file/key", b""), lambda: objects.put_new("file/key", b"")):
        with pytest.raises(StoreError, match=r"Not a directory|File exists") as told:
            call()
        assert "\n" not in str(told.value)
        assert "Debug source" not in "".join(traceback.format_exception(told.value))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Generic S3 error: refused\n\nDebug source:\nGeneric {", "Generic S3 error: refused"),
        (
            'Error: 403 Forbidden: <?xml version="1.0"?>\n<Error><Code>InvalidAccessKeyId</Code></Error>',
            "Error: 403 Forbidden (InvalidAccessKeyId)",
        ),
    ],
)
def test_of_a_page_the_line_that_says_it_is_left(text: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise GenericError(text)

    monkeypatch.setattr("obstore.put", broken)
    with pytest.raises(StoreError) as told:
        Objects.in_memory().put("k", b"")
    assert str(told.value) == line


def race(runners: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=run) for run in runners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "my täglicher 100% #1 store"
    Objects.open(folder.as_uri()).put("a", b"1")
    assert (folder / "a").read_bytes() == b"1"
