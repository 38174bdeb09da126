"""Clicks on advertisements in Criteo's layout, as a dataset that may be larger than memory.

A row is a label (0 or 1), 13 numbers I1..I13 and 26 categories C1..C26 of 8 hexadecimal digits; a number or a
category may be missing. Either layout is recognized: tab-separated without a header (Criteo's own files), or
comma-separated with one (`label,I1,...,C26`). Rows are read at random, so a compressed file must be unpacked first.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

NUMBERS = [f"I{i}" for i in range(1, 14)]
CATEGORIES = [f"C{i}" for i in range(1, 27)]
COLUMNS = ["label", *NUMBERS, *CATEGORIES]
SUFFIXES = {"", ".txt", ".tsv", ".csv"}
LONGEST_LINE = 1024
"""Bytes; a row takes about 250, and the longest that makes sense 500."""
BINS = 128
"""Embeddings per number: one for "missing", the others for a quarter of the logarithm each."""

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class MalformedLine(ValueError):
    """A line that is no row: names the file, the line's number and what was expected."""


class Clicks(Dataset[Batch]):
    """The rows of files, in the order of the files; read from disk whenever they are asked for.

    Only the positions of the lines are kept, in a temporary file that is mapped into memory (8 bytes a row).
    Ask for many rows at once: `__getitems__` gives a whole batch, and is what torch's DataLoader calls.

    Args:
        paths: files, or folders of files without a suffix or with .txt, .tsv or .csv.
        buckets: embeddings per category field: one for "missing", the others shared out by the category's hexadecimal
            digits, which are a hash already. So no category is unknown.

    Raises:
        ValueError: there is no file, or one is empty, compressed, or of another layout.
    """

    def __init__(self, paths: Sequence[str | Path], *, buckets: int = 10_000) -> None:
        self.files = [file for path in paths for file in _files(Path(path))]
        self.buckets = buckets
        self._separators = [_separator(file) for file in self.files]
        # Positions are counted as if the files were one.
        self._first = np.cumsum([0, *(file.stat().st_size for file in self.files)])
        self._lines = _index(self.files, self._first[:-1])

    @property
    def embeddings(self) -> int:
        """Rows of the table of embeddings that all fields share."""
        return len(NUMBERS) * BINS + len(CATEGORIES) * self.buckets

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Batch:
        numbers, fields, labels = self.__getitems__([index])
        return numbers[0], fields[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        """A batch, in the order of `indices`.

        Returns:
            Numbers, float32 (n, 13): sign(x) log(1 + |x|), 0 where missing.
            Fields, int64 (n, 39): rows of the table of embeddings, for I1..I13 and C1..C26.
            Labels, float32 (n).

        Raises:
            MalformedLine: a line is no row.
        """
        positions = np.asarray(self._lines[indices])
        files = np.searchsorted(self._first, positions, side="right") - 1
        rows: list[list[bytes]] = [[]] * len(positions)
        # In the order of the disk; pread leaves no position behind that worker processes would share.
        for number, group in itertools.groupby(np.argsort(positions), key=files.__getitem__):
            with self.files[number].open("rb", buffering=0) as file:
                for i in group:
                    line = os.pread(file.fileno(), LONGEST_LINE, int(positions[i] - self._first[number]))
                    rows[i] = line.partition(b"\n")[0].rstrip(b"\r").split(self._separators[number])
        try:
            return parse(rows, self.buckets)
        except Fault as fault:
            number, row = files[fault.row], fault.row
            line = _line_number(self.files[number], int(positions[row] - self._first[number]))
            raise MalformedLine(f"{self.files[number]}, line {line}: {fault}") from None


class Fault(ValueError):
    """What is wrong with one row of a batch.

    Args:
        row: its place in the batch, from 0.
    """

    def __init__(self, row: int, why: str) -> None:
        super().__init__(why)
        self.row = int(row)


def parse(rows: list[list[bytes]], buckets: int) -> Batch:
    """Rows of 40 fields each, as `Clicks.__getitems__` describes them.

    Raises:
        Fault: a field is not what it should be; the row and the field are named.
    """
    for row, fields in enumerate(rows):
        if len(fields) != len(COLUMNS):
            raise Fault(row, f"got {len(fields)} fields, expected 40: a label, 13 numbers, 26 categories")
    table = np.array(rows)
    clicked = table[:, :1] == b"1"
    _check(clicked | (table[:, :1] == b"0"), table, 0, "0 or 1")
    numbers = _numbers(table[:, 1:14])
    _check(~np.isinf(numbers), table, 1, "a number, or nothing where it is missing")
    hashes, valid = _hashes(table[:, 14:])
    _check(valid, table, 14, "8 hexadecimal digits, or nothing where it is missing")

    logs = np.sign(numbers) * np.log1p(np.abs(numbers))
    missing = np.isnan(logs)
    logs[missing] = 0
    # Embedded as categories are, a number may have any effect, not only one that grows with it.
    bins = np.where(missing, 0, 1 + np.clip(np.round(4 * logs) + BINS // 4, 0, BINS - 2)).astype(np.int64)
    categories = np.where(table[:, 14:] == b"", 0, 1 + hashes % (buckets - 1))
    first = np.cumsum([0, *[BINS] * 13, *[buckets] * 25])
    return (
        torch.from_numpy(logs.astype(np.float32)),
        torch.from_numpy(np.hstack([bins, categories]) + first),
        torch.from_numpy(clicked[:, 0].astype(np.float32)),
    )


def _numbers(text: np.ndarray) -> np.ndarray:
    """float64 of the same shape: NaN where missing, infinite where it is no number."""
    text = np.where(text == b"", b"nan", text)
    try:
        return text.astype(np.float64)
    except ValueError:
        return np.vectorize(_number, otypes=[np.float64])(text)


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:
        return np.inf


_DIGITS = np.full(256, -1, dtype=np.int64)
_DIGITS[np.frombuffer(b"0123456789abcdefABCDEF", np.uint8)] = [*range(16), *range(10, 16)]


def _hashes(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 of 8 hexadecimal digits each, and whether each is that, or missing; of the same shape."""
    eight = text.astype("S8")
    digits = _DIGITS[np.ascontiguousarray(eight).view(np.uint8).reshape(*text.shape, 8)]
    valid = ((digits >= 0).all(axis=-1) & (eight == text)) | (text == b"")
    return digits @ 16 ** np.arange(7, -1, -1), valid


def _check(valid: np.ndarray, table: np.ndarray, first_column: int, expected: str) -> None:
    if not valid.all():
        row, column = np.argwhere(~valid)[0]
        column += first_column
        raise Fault(row, f"{COLUMNS[column]}: got {table[row, column].decode(errors='replace')!r}, expected {expected}")


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES and not file.name.startswith("."))
    if not files:
        raise ValueError(f"{path}: found no file without a suffix or with .txt, .tsv or .csv")
    return files


def _separator(file: Path) -> bytes:
    with file.open("rb") as opened:
        first = opened.readline(LONGEST_LINE).rstrip(b"\r\n")
    if first == ",".join(COLUMNS).encode():
        return b","
    if first.count(b"\t") == len(COLUMNS) - 1 and not first.startswith(b"label"):
        return b"\t"
    raise ValueError(
        f"{file}: begins with {first[:60]!r}, expected 40 tab-separated fields, or the header label,I1,...,C26"
        " (a compressed file must be unpacked first)"
    )


def _index(files: list[Path], first: np.ndarray, chunk_bytes: int = 1 << 24) -> np.ndarray:
    """Where each row begins, int64: not where headers and blank lines do."""
    # In a file without a name, made anew by each run: it leaves nothing behind, and is never out of date.
    with tempfile.TemporaryFile() as index:
        for file, offset in zip(files, first, strict=True):
            has_header = _separator(file) == b","
            for starts in _line_starts(file, chunk_bytes):
                (starts[has_header:] + offset).tofile(index)
                has_header = False
        if index.tell() == 0:
            raise ValueError(f"{', '.join(map(str, files))}: expected rows, found none")
        return np.memmap(index, dtype=np.int64, mode="r")


def _line_starts(file: Path, chunk_bytes: int) -> Iterator[np.ndarray]:
    """Where lines begin that are not blank, chunk by chunk."""
    newline, position = ord("\n"), 0
    with file.open("rb") as opened:
        before = newline
        while chunk := opened.read(chunk_bytes):
            data = np.frombuffer(chunk, np.uint8)
            begins = np.append(np.uint8(before), data[:-1]) == newline
            yield np.flatnonzero(begins & (data != newline) & (data != ord("\r"))) + position
            before, position = data[-1], position + len(data)


def _line_number(file: Path, position: int) -> int:
    count = 1
    with file.open("rb") as opened:
        while position > 0 and (chunk := opened.read(min(position, 1 << 24))):
            count += chunk.count(b"\n")
            position -= len(chunk)
    return count
