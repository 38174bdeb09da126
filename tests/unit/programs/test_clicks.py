"""The reader of Criteo's layout: what a row becomes, in either layout, and what is said of a row that is none."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path

import clicks
import numpy as np
import pytest
import torch
from clicks import Clicks, MalformedLine
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, default_convert

HEADER = ",".join(["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))])

# Two rows of our own, shaped as Criteo's are: with empty fields, a negative number, and numbers written with a point.
SAMPLE = (
    "0,,3,260.0,,17668.0,,,33.0,,,,0.0,,0a1b2c3d,10000001,20000002,30000003,40000004,50000005,60000006,70000007,"
    "80000008,90000009,a000000a,b000000b,c000000c,d000000d,e000000e,f000000f,00000010,00000011,,,00000014,,00000016,"
    "00000017,,\n"
    "0,,-1,19.0,35.0,30251.0,247.0,1.0,35.0,160.0,,1.0,,35.0,deadbeef,1000000a,2000000b,3000000c,4000000d,5000000e,"
    "6000000f,70000010,80000008,90000012,a0000013,b0000014,c0000015,d0000016,e0000017,f0000018,00000019,0000001a,,,"
    "0000001d,,0000001f,00000020,,"
)
REAL = Path(__file__).resolve().parents[4] / "shared/data/criteo_sample.csv"


def row(label: str = "0", numbers: dict[int, str] | None = None, categories: dict[int, str] | None = None) -> list[str]:
    """The fields of a row, "1" and "0000000a" but for those given by number."""
    return [
        label,
        *((numbers or {}).get(i, "1") for i in range(1, 14)),
        *((categories or {}).get(i, "0000000a") for i in range(1, 27)),
    ]


def write(path: Path, *rows: list[str], end: str = "\n") -> Path:
    path.write_bytes("".join("\t".join(fields) + end for fields in rows).encode())
    return path


def same(left: clicks.Batch, right: clicks.Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def test_two_rows_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "sample.csv"
    file.write_text(f"{HEADER}\n{SAMPLE}\n")
    data = Clicks([file], buckets=1000)
    assert len(data) == 2
    logs, fields, labels = data.__getitems__([0, 1])
    assert labels.tolist() == [0, 0]
    assert (logs.shape, fields.shape) == ((2, 13), (2, 39))

    expected = [0, math.log(4), math.log(261), 0, math.log(17669), 0, 0, math.log(34), 0, 0, 0, 0, 0]
    assert logs[0].tolist() == pytest.approx(expected)
    assert logs[1, 1].item() == pytest.approx(-math.log(2))

    bins, categories = fields[:, :13], fields[:, 13:] - 13 * 128
    assert [field for field in range(13) if bins[0, field] == 128 * field] == [0, 3, 5, 6, 8, 9, 10, 12]
    assert bins[0, 2].item() == 2 * 128 + 1 + 32 + round(4 * math.log(261))
    assert bins[1, 1].item() == 128 + 1 + 32 + round(-4 * math.log(2))
    assert categories[0, 0].item() == 1 + 0x0A1B2C3D % 999
    assert categories[0, 8].item() == categories[1, 8].item() == 8000 + 1 + 0x80000008 % 999
    assert [field for field in range(26) if categories[0, field] == 1000 * field] == [18, 19, 21, 24, 25]


@pytest.mark.skipif(not REAL.is_file(), reason=f"no sample at {REAL}: it is not part of the project")
def test_the_real_sample_is_read_whole() -> None:
    data = Clicks([REAL])
    numbers, fields, labels = data.__getitems__(range(len(data)))
    assert len(data) == 200
    assert set(labels.tolist()) == {0.0, 1.0}
    assert torch.isfinite(numbers).all()
    assert 0 <= int(fields.min()) <= int(fields.max()) < data.embeddings


def test_both_layouts_read_equal(tmp_path: Path) -> None:
    comma, tab = tmp_path / "a.csv", tmp_path / "b.tsv"
    comma.write_text(f"{HEADER}\n{SAMPLE}")
    tab.write_text(SAMPLE.replace(",", "\t") + "\n")
    assert same(Clicks([comma]).__getitems__([1, 0]), Clicks([tab]).__getitems__([1, 0]))


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("whole", [True, False])
def test_line_ends_and_blank_lines_make_no_difference(tmp_path: Path, end: str, whole: bool) -> None:
    rows = [row("1", {2: "-3"}, {26: ""}), row("0", {1: ""}), row("1", {13: ""}, {26: "ffffffff"})]
    plain = Clicks([write(tmp_path / "plain", *rows)])
    file = write(tmp_path / "other", *rows, end=end)
    if not whole:  # the last line has no end
        file.write_bytes(file.read_bytes().rstrip(b"\r\n"))
    data = Clicks([file])
    assert len(data) == 3
    assert same(data.__getitems__([2, 0, 1]), plain.__getitems__([2, 0, 1]))


def test_any_category_has_a_place_in_its_field_and_a_missing_one_has_its_own(tmp_path: Path) -> None:
    values = ["", "00000000", "ffffffff", "DEADBEEF", "deadbeef", "00000006"]
    data = Clicks([write(tmp_path / "x", *(row(categories={1: value, 26: value}) for value in values))], buckets=7)
    _, fields, _ = data.__getitems__(range(6))
    categories = fields[:, 13:] - 13 * 128
    assert categories[:, 0].tolist() == [0, 1, 1 + 0xFFFFFFFF % 6, 1 + 0xDEADBEEF % 6, 1 + 0xDEADBEEF % 6, 1]
    assert (categories[:, 25] - categories[:, 0]).tolist() == [7 * 25] * 6
    assert data.embeddings == 13 * 128 + 26 * 7


@given(st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(10**15), 10**15)))
def test_the_log_keeps_a_numbers_sign_and_is_undone_by_its_inverse(value: float) -> None:
    fields = [field.encode() for field in row(numbers={5: repr(value)})]
    numbers, places, _ = clicks.parse([fields], 10)
    log, place = numbers[0, 4].item(), places[0, 4].item() - 4 * 128
    assert 0 < place < 128
    assert math.copysign(1, value) * log >= 0
    assert math.expm1(abs(log)) == pytest.approx(abs(value), rel=1e-3) if abs(value) < 1e10 else abs(log) > 23


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (row("2"), "label: got '2', expected 0 or 1"),
        (row(""), "label: got '', expected 0 or 1"),
        (row(numbers={7: "many"}), "I7: got 'many', expected a number"),
        (row(numbers={1: "inf"}), "I1: got 'inf', expected a number"),
        (row(categories={3: "xyz"}), "C3: got 'xyz', expected 8 hexadecimal digits"),
        (row(categories={3: "123456789"}), "C3: got '123456789', expected 8 hexadecimal digits"),
        (row(categories={26: "0x1234ab"}), "C26: got '0x1234ab', expected 8 hexadecimal digits"),
        (row()[:-1], "got 39 fields, expected 40"),
        ([*row(), ""], "got 41 fields, expected 40"),
        (["x" * 3000], "got 1 fields, expected 40"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, bad: list[str], why: str) -> None:
    file = write(tmp_path / "clicks.tsv", row(), [], row(), bad, row())
    data = Clicks([write(tmp_path / "before.tsv", row()), file])
    with pytest.raises(MalformedLine) as error:
        data.__getitems__([4, 3, 0, 1])
    assert str(error.value).startswith(f"{file}, line 4: {why}")
    assert same(data.__getitems__([4]), data.__getitems__([0]))  # the rows around it can be read


@given(st.lists(st.binary(max_size=12).filter(lambda field: b"\n" not in field), min_size=1, max_size=4))
def test_of_any_bytes_a_row_is_made_or_its_fault_is_told(junk: list[bytes]) -> None:
    fields = [field.encode() for field in row()]
    for column, field in zip((0, 2, 15, 39), junk, strict=False):
        fields[column] = field
    good = [field.encode() for field in row()]
    try:
        numbers, places, _ = clicks.parse([good, fields], 10)
    except clicks.Fault as fault:
        told = fault.row
    else:
        told = 1
        assert torch.isfinite(numbers).all()
        assert ((places >= 0) & (places < 13 * 128 + 260)).all()
    assert told == 1


def test_what_is_no_such_file_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "day.gz").write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(ValueError, match=r"day\.gz: begins with .*compressed"):
        Clicks([tmp_path / "day.gz"])
    (tmp_path / "empty").touch()
    with pytest.raises(ValueError, match="empty: begins with b''"):
        Clicks([tmp_path / "empty"])
    (tmp_path / "only.csv").write_text(HEADER + "\n")
    with pytest.raises(ValueError, match=r"only\.csv: expected rows, found none"):
        Clicks([tmp_path / "only.csv"])
    (tmp_path / "other.csv").write_text("label,a,b\n0,1,2\n")
    with pytest.raises(ValueError, match=r"other\.csv: begins with b'label,a,b'"):
        Clicks([tmp_path / "other.csv"])
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="folder: found no file"):
        Clicks([tmp_path / "folder"])


def test_several_files_are_one_dataset_in_the_order_of_their_names(tmp_path: Path) -> None:
    write(tmp_path / "day_1", row("1", {1: "11"}), row("0", {1: "12"}))
    (tmp_path / "day_2.csv").write_text(HEADER + "\n" + ",".join(row("1", {1: "21"})))
    write(tmp_path / "day_3.txt", row("0", {1: "31"}))
    (tmp_path / "best.json").write_text("{}")
    data = Clicks([tmp_path])
    numbers, _, labels = data.__getitems__([3, 2, 1, 0, 2])
    assert numbers[:, 0].expm1().round().tolist() == [31, 21, 12, 11, 21]
    assert labels.tolist() == [0, 1, 0, 1, 1]
    assert len(data) == 4
    assert same(data.__getitems__([1]), tuple(part[None] for part in data[1]))


@given(st.lists(st.sampled_from([b"a" * 5, b"b", b"", b"\r"]), max_size=30), st.integers(1, 40), st.booleans())
def test_lines_begin_at_the_same_places_whatever_the_chunks(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], chunk_bytes: int, ended: bool
) -> None:
    file = tmp_path_factory.mktemp("lines") / "file"
    file.write_bytes(b"\n".join(lines) + b"\n" * ended)
    found = [int(start) for starts in clicks._line_starts(file, chunk_bytes) for start in starts]
    expected, position = [], 0
    for line in lines:
        if line not in (b"", b"\r"):
            expected.append(position)
        position += len(line) + 1
    assert found == expected


def test_the_index_and_a_batch_take_memory_that_does_not_grow_with_the_file(tmp_path: Path) -> None:
    line = ("\t".join(row()) + "\n").encode()
    file = tmp_path / "big"
    with file.open("wb") as opened:
        for _ in range(60):
            opened.write(line * 5000)
    tracemalloc.start()
    try:
        index = clicks._index([file], np.array([0]), chunk_bytes=1 << 18)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index) == 300_000
    assert isinstance(index, np.memmap)
    assert peak < 8 << 20 < file.stat().st_size / 8


def test_worker_processes_read_the_same_and_leave_no_file_open(tmp_path: Path) -> None:
    rows = [row(str(i % 2), {1: str(i)}) for i in range(200)]
    data = Clicks([write(tmp_path / "x", *rows)])
    before = len(list(Path("/proc/self/fd").iterdir()))
    alone = list(DataLoader(data, 16, collate_fn=default_convert))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    together = list(DataLoader(data, 16, num_workers=2, collate_fn=default_convert))
    assert len(together) == 13
    assert all(same(tuple(a), tuple(b)) for a, b in zip(alone, together, strict=True))
