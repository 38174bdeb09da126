"""Log and metrics reach the store in order, each line once, in bounded pieces."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpucost.clock import ManualClock
from gpucost.jobstore import JobStore, Live, MetricPoint, Phase, Telemetry
from gpucost.objects import Objects
from gpucost.reasons import Reason
from gpucost.training.agent.identity import Identity
from gpucost.training.agent.relay import CHUNK_BYTES, PIECES_AT_ONCE, Relay, Tail, cut
from gpucost.training.workdir import Progress, Workdir

NOW = datetime(2026, 11, 30, tzinfo=UTC)


class Node:
    """A relay on a store in memory."""

    def __init__(self, tmp_path: Path, log_limit: int = 1 << 24) -> None:
        self.objects = Objects.in_memory()
        self.store = JobStore(self.objects, "job")
        self.workdir = Workdir(tmp_path)
        self.relay = Relay(
            self.store, Live(self.objects), self.workdir, Identity("job", "l-1", 3), ManualClock(NOW), log_limit
        )

    def write(self, text: str) -> None:
        with self.workdir.log.open("a") as log:
            log.write(text)

    def sent(self) -> list[str]:
        return [text for _, text in self.store.log(3)]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@given(data=st.binary(max_size=300) | st.text(alphabet="aé€😀\n", max_size=100).map(str.encode))
@pytest.mark.parametrize("limit", [4, 16, 64])
def test_pieces_join_to_the_whole_and_are_bounded(data: bytes, limit: int) -> None:
    pieces = []
    rest = data
    while size := cut(rest[: limit + 1], limit, final=True):
        pieces.append(rest[:size])
        rest = rest[size:]
    assert rest == b""
    assert b"".join(pieces) == data
    assert all(len(piece) <= limit for piece in pieces)


@given(text=st.text(alphabet="aé€😀\n", max_size=100))
def test_no_piece_cuts_a_character(text: str) -> None:
    rest, read = text.encode(), ""
    while size := cut(rest[:9], 8, final=True):
        read += rest[:size].decode()
        rest = rest[size:]
    assert read == text


def test_an_unfinished_line_waits_for_its_end() -> None:
    assert cut(b"one\ntw", 100, final=False) == 4
    assert cut(b"tw", 100, final=False) == 0
    assert cut(b"tw", 100, final=True) == 2


def test_each_line_is_sent_once_and_in_order(node: Node) -> None:
    node.write("one\ntwo\nthr")
    node.relay.forward()
    node.relay.forward()
    node.write("ee\nfour")
    node.relay.forward()
    node.relay.forward(final=True)
    assert node.sent() == ["one\ntwo\n", "three\n", "four"]


def test_a_long_log_goes_in_bounded_pieces(node: Node) -> None:
    text = "".join(f"line {number}\n" for number in range(60_000))
    node.write(text)
    node.relay.forward(final=True)
    assert "".join(node.sent()) == text
    assert len(node.sent()) == -(-len(text) // CHUNK_BYTES)
    assert all(len(piece) <= CHUNK_BYTES and piece.endswith("\n") for piece in node.sent())


def test_a_piece_that_may_have_arrived_is_sent_again_unchanged(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.write("one\n")
    with monkeypatch.context() as patched:
        write = JobStore.write_log

        def arrives_but_fails(self: JobStore, number: int, index: int, text: str) -> None:
            write(self, number, index, text)
            raise ConnectionResetError

        patched.setattr(JobStore, "write_log", arrives_but_fails)
        with pytest.raises(ConnectionResetError):
            node.relay.forward()
    node.write("two\n")
    node.relay.forward()
    assert node.sent() == ["one\n", "two\n"]


def test_too_much_log_is_cut_and_its_end_is_kept(tmp_path: Path) -> None:
    node = Node(tmp_path, log_limit=300_000)
    text = "".join(f"line {number}\n" for number in range(100_000))
    node.write(text)
    node.relay.forward()
    assert sum(map(len, node.sent())) < 300_000 + CHUNK_BYTES
    node.write("the last word\n")
    node.relay.forward(final=True)
    node.relay.forward(final=True)
    sent = "".join(node.sent())
    assert sent.startswith("line 0\nline 1\n")
    assert sent.endswith("line 99999\nthe last word\n")
    assert sent.count("bytes of log left out here") == 1
    assert len(sent) < 300_000 + CHUNK_BYTES + 70_000
    notes = [line for line in sent.splitlines() if line.startswith("[gpucost: ")]
    assert notes[0] == "[gpucost: the log is long; of what follows, the end is sent]"
    left_out = int(notes[1].split()[1])
    assert len(sent) - sum(len(note) + 2 for note in notes) + left_out == node.workdir.log.stat().st_size
    assert all(line.startswith(("line ", "the last", "[gpucost: ")) for line in sent.splitlines() if line)


def test_a_long_log_gives_its_disk_back_while_it_grows(tmp_path: Path) -> None:
    node = Node(tmp_path, log_limit=300_000)
    with node.workdir.log.open("a") as log:  # As a program does: it never closes it.
        for part in range(8):
            log.write("".join(f"line {part} {number:09d}\n" for number in range(100_000)))
            log.flush()
            node.relay.trim()
            node.relay.forward()
        log.write("the last word\n")
    node.relay.forward(final=True)
    status = node.workdir.log.stat()
    assert status.st_size > 8 * 1_500_000
    assert status.st_blocks * 512 < 2_500_000
    sent = "".join(node.sent())
    assert sent.startswith("line 0 000000000\n")
    assert sent.endswith("line 7 000099999\nthe last word\n")
    assert "\0" not in sent


def test_a_short_log_is_left_alone(node: Node) -> None:
    node.relay.trim()
    node.write("one\n" * 1000)
    node.relay.trim()
    assert node.workdir.log.read_text() == "one\n" * 1000


def test_telemetry_that_fails_is_said_once_and_heartbeats_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = Node(tmp_path)
    answers: Iterator[Telemetry | Exception] = iter(
        [Telemetry(cpu_percent=50), RuntimeError("driver"), RuntimeError("driver"), Telemetry(cpu_percent=70)]
    )

    def sample() -> Telemetry:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    relay = Relay(
        node.store, Live(node.objects), node.workdir, Identity("job", "l-1", 3), ManualClock(NOW), sample=sample
    )
    told = []
    for _ in range(4):
        relay.beat()
        beat = Live(node.objects).read("l-1")
        assert beat is not None
        told.append(beat.telemetry.cpu_percent if beat.telemetry else None)
    assert told == [50, None, None, 70]
    assert capsys.readouterr().err.count("RuntimeError: driver") == 1


def test_metrics_arrive_as_written_but_for_half_a_line(node: Node) -> None:
    for step in (10, 20):
        node.workdir.add_metrics(MetricPoint(step=step, at=NOW, values={"loss": 1 / step}))
    node.relay.forward()
    node.workdir.add_metrics(MetricPoint(step=30, at=NOW, values={"loss": 0.1}))
    with node.workdir.metrics.open("a") as file:
        file.write('{"step": 40, "at"')
    node.relay.forward(final=True)
    assert [point.step for _, points in node.store.metrics(3) for point in points] == [10, 20, 30]


def test_lines_that_are_no_metrics_are_left_out_and_counted(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    node.workdir.add_metrics(MetricPoint(step=10, at=NOW, values={"loss": 0.1}))
    with node.workdir.metrics.open("ab") as file:
        file.write(b'{"step": -1}\nhello\n\xff\xfe\n')
    node.workdir.add_metrics(MetricPoint(step=20, at=NOW, values={"loss": 0.1}))
    node.relay.forward()
    node.relay.forward(final=True)
    assert [point.step for _, points in node.store.metrics(3) for point in points] == [10, 20]
    assert node.relay.bad_metrics == 3
    assert capsys.readouterr().err.count("3 lines are no metrics and were left out, 3 so far") == 1


def test_what_the_program_garbled_stops_no_heartbeat(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("progress.json", "result.json"):
        (node.workdir.path / name).write_text('{"step": "many"}')
    node.relay.beat()
    node.relay.beat()
    assert node.relay.result() is None
    beat = Live(node.objects).read("l-1")
    assert beat is not None
    assert (beat.sequence, beat.phase) == (1, Phase.STARTING)
    said = capsys.readouterr().err
    assert said.count("the program's progress cannot be read") == 1
    assert said.count("the program's result cannot be read") == 1
    node.workdir.write_progress(Progress(step=70, at=NOW))
    node.relay.beat()
    assert (heard := Live(node.objects).read("l-1"))
    assert heard.step == 70


@pytest.mark.parametrize("name", ["progress.json", "result.json", "failure.json", "program.log", "metrics.jsonl"])
def test_a_folder_in_a_files_place_stops_no_heartbeat(node: Node, name: str) -> None:
    place = node.workdir.path / name
    place.unlink(missing_ok=True)
    place.mkdir()
    node.relay.beat()
    node.relay.forward(final=True)
    assert (node.relay.progress(), node.relay.result(), node.relay.failure()) == (None, None, None)


def test_much_log_leaves_the_next_heartbeat_its_turn(node: Node) -> None:
    node.workdir.log.write_bytes(b"x" * (CHUNK_BYTES * (PIECES_AT_ONCE + 2)) + b"\n")
    node.relay.forward()
    assert len(node.sent()) == PIECES_AT_ONCE
    node.relay.forward()
    assert sum(map(len, node.sent())) == node.workdir.log.stat().st_size


def test_a_piece_starts_where_the_confirmed_one_ended(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "log", chunk=4)
    assert tail.next() is None
    (tmp_path / "log").write_text("ab\ncd\n")
    first = tail.next()
    assert first == tail.next()
    tail.confirm()
    second = tail.next()
    assert (first and first.data, second and second.data) == (b"ab\n", b"cd\n")


def test_heartbeats_tell_the_programs_progress(node: Node) -> None:
    node.relay.beat()
    node.workdir.write_progress(
        Progress(step=70, epoch=2, at=NOW, total_steps=90, loss=0.5, steps_per_second=3, resumed_step=60, saved_step=60)
    )
    node.relay.beat()
    beat = Live(node.objects).read("l-1")
    assert beat is not None
    assert (beat.sequence, beat.phase, beat.step, beat.total_steps) == (1, Phase.TRAINING, 70, 90)
    assert (beat.epoch, beat.loss, beat.steps_per_second, beat.resumed_step, beat.saved_step) == (2, 0.5, 3, 60, 60)
    node.relay.beat(exited=Reason.COMPLETED)
    last = Live(node.objects).read("l-1")
    assert last is not None
    assert (last.sequence, last.phase, last.exited) == (2, Phase.ENDED, Reason.COMPLETED)
