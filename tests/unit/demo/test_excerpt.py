"""Of a failed service's log, the lines that say why."""

from demo.excerpt import choose, excerpt


def noise(count, word="info"):
    return [f"12:00:{number:02} [{word}] request {number}" for number in range(count)]


TRACEBACK = [
    "Traceback (most recent call last):",
    '  File "server.py", line 3, in <module>',
    "    main()",
    '  File "server.py", line 9, in main',
    "    bind(port)",
    "OSError: [Errno 98] Address already in use",
]


def test_a_short_log_is_shown_whole():
    assert choose(["one", "", "two"]) == ["one", "two"]


def test_the_end_of_a_traceback_far_above_is_shown_with_the_last_lines():
    chosen = choose([*noise(50), *TRACEBACK, *noise(200)])
    assert len(chosen) == 15
    assert chosen[:3] == TRACEBACK[-3:]
    assert chosen[-1] == noise(200)[-1]


def test_lines_of_alarm_come_before_noise():
    alarms = ["12:00:00 [error] cannot open database", "F0101 weed: bind: address in use"]
    chosen = choose([*noise(30), *alarms, *noise(30)])
    assert chosen[:2] == alarms


def test_many_alarms_do_not_push_out_the_latest_lines():
    chosen = choose([*noise(100, "error"), "the end"])
    assert chosen[-1] == "the end"
    assert len(chosen) == 15


def test_without_alarms_the_last_lines_are_shown():
    assert choose(noise(40)) == noise(40)[-15:]


def test_secrets_and_colours_are_taken_out(tmp_path):
    log = tmp_path / "x.log"
    log.write_text("\x1b[31mERROR\x1b[0m password=hunter2 refused\n")
    assert excerpt(log, secrets=["hunter2"]) == ["ERROR password=*** refused"]


def test_a_missing_log_is_said(tmp_path):
    assert "no log" in excerpt(tmp_path / "x.log")[0]
