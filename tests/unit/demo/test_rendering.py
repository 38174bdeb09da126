"""What is shown where there is no terminal, and the tables."""

import io
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import pytest
from rich.console import Console

from demo.progress import READY, STARTING, WAITING, LiveProgress, PlainProgress, is_live
from demo.timeline import AttemptRow, Timeline, TimelineEvent, progress_line, result_table

T0 = datetime(2026, 11, 30, 12, tzinfo=UTC)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    "environ", [{"TERM": "xterm", "CI": "1"}, {"TERM": "xterm", "NO_COLOR": "1"}, {"TERM": "dumb"}, {}]
)
def test_nothing_is_drawn_where_it_would_disturb(environ):
    assert not is_live(Terminal(), environ)


def test_a_terminal_is_drawn_on_and_a_pipe_is_not():
    assert is_live(Terminal(), {"TERM": "xterm"})
    assert not is_live(io.StringIO(), {"TERM": "xterm"})


def test_plain_progress_is_one_line_per_change():
    lines = []
    with PlainProgress(lines.append) as progress:
        progress.update("s3", WAITING)
        progress.update("s3", STARTING, 0.1, "does not listen yet")
        progress.update("s3", STARTING, 0.4, "answers 503")
        progress.update("s3", READY, 3.52, "http://127.0.0.1:8333")
        progress.update("s3", READY, 3.9, "http://127.0.0.1:8333")
        progress.say("port 8080 is busy")
    assert lines == ["s3: starting", "s3: ready after 3.5 s  http://127.0.0.1:8333", "port 8080 is busy"]


def test_the_live_table_shows_name_state_seconds_and_address():
    out = io.StringIO()
    with LiveProgress(Console(file=out, width=100, force_terminal=True)) as progress:
        progress.update("s3", READY, 3.52, "http://127.0.0.1:8333")
        progress.update("mlflow", STARTING, 1.0, "does not listen yet")
    text = out.getvalue()
    assert all(word in text for word in ("s3", "ready", "3.5", "http://127.0.0.1:8333", "mlflow", "starting"))


def test_the_timeline_in_plain_lines():
    lines = []
    with Timeline(live=False, write=lines.append) as timeline:
        timeline.event(TimelineEvent(T0, "lease", "bought in use1-az1", {"price": "0.33"}))
        timeline.status("step 1/2")
        timeline.status("step 1/2")
        timeline.event(TimelineEvent(T0 + timedelta(hours=1, seconds=5), "interruption", "gone without notice"))
    assert lines == [
        "12:00:00 +0:00:00  lease         bought in use1-az1  price=0.33",
        "step 1/2",
        "13:00:05 +1:00:05  interruption  gone without notice",
    ]


def test_on_a_terminal_events_stay_and_the_status_is_drawn_below():
    out = io.StringIO()
    with Timeline(live=True, console=Console(file=out, width=100, force_terminal=True)) as timeline:
        timeline.event(TimelineEvent(T0, "interruption", "gone [without] notice"))
        timeline.status("step 7/9")
    assert "gone [without] notice" in out.getvalue()
    assert "step 7/9" in out.getvalue()


def test_the_status_line():
    line = progress_line(step=300, steps=1200, steps_per_second=41.23, loss=0.41234, money=Decimal("0.03"), width=8)
    assert line == "[##------] step 300/1200  41.2 steps/s  loss 0.4123  $0.0300 so far"
    assert progress_line(step=0, steps=0, width=4) == "[----] step 0/0"


def test_the_result_table_is_readable_at_100_columns_and_adds_up():
    rows = [
        AttemptRow(
            attempt=1,
            pool="us-east-1 use1-az1 g5.xlarge spot",
            start=T0,
            end=T0 + timedelta(minutes=90),
            dollars=Decimal("0.5000"),
            steps=500,
            lost=38,
            resumed_at=None,
            ended_because="interruption without notice",
        ),
        AttemptRow(
            2, "us-east-1 use1-az2 g5.xlarge spot", T0, T0 + timedelta(hours=1), Decimal("0.4"), 700, 0, 500, "finished"
        ),
    ]
    out = io.StringIO()
    Console(file=out, width=100).print(result_table(rows))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    for expected in ("12:00:00-13:30:00", "1.50", "0.5000", "500", "38", "finished", "2.50", "0.9000", "1200"):
        assert expected in text
