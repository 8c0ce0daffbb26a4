"""Progress bars: redrawn on a terminal, a line now and then elsewhere, from the events of a job."""

from __future__ import annotations

import pytest

from fixtures.progress import _write
from taugate.pipeline.bar import Bar, CaptureBar, draw, duration, size


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Terminal:
    def __init__(self, isatty):
        self.isatty, self.text = isatty, ""

    def ensure_newline(self):
        pass

    def flush(self):
        pass

    def write(self, text):
        self.text += text

    def write_line(self, text):
        self.text += text + "\n"


def test_lines_stay_now_and_then_and_at_the_end():
    said, clock = [], Clock()
    bar = Bar(said.append, "fetch", every=10, clock=clock)
    for second in range(31):
        clock.now = second
        bar(second, 30, f"{second} of 30")
    kept = [line for line in said if not line.startswith("\r")]
    assert [line.rpartition("] ")[2] for line in kept] == ["10 of 30", "20 of 30", "30 of 30"]
    assert len(said) == 31, "and every other event redraws the bar"


def test_many_events_do_not_flood_a_terminal():
    said, clock = [], Clock()
    bar = Bar(said.append, "fetch", clock=clock)
    for event in range(1000):
        clock.now = event / 1000
        bar(event, 1000)
    assert len(said) <= 6


def test_the_events_of_a_capture_become_a_bar():
    said, clock = [], Clock()
    bar = CaptureBar(said.append, clock)
    events = [
        {"event": "loading", "done": 2, "of": 10, "device": "cuda"},
        {"event": "hashing", "file": "model-00001.safetensors", "done_bytes": 2**30, "of_bytes": 2**32, "left_s": 90},
        {"event": "layer", "layer": 31, "of": 64, "prompts": 8, "bytes": 3 * 2**30, "left_s": 65.0},
        {"event": "state", "done": 10, "of": 10, "tokens": 5, "bytes": 2**20, "left_s": 0.0},
        {"event": "done"},
        {"event": "something of a later version"},
    ]
    for event in events:
        clock.now += 100
        bar(event)
    assert said == [
        "loading the target on cuda; 2/10 sequences are there",
        "hashing weights [######..................] 1.0 GiB of 4.0 GiB, model-00001.safetensors, 1:30 left",
        "capture [############............] layer 32/64, 8 prompts, 3.0 GiB of weights, 1:05 left",
        "capture [########################] 10/10 prompts, 1.0 MiB, 0:00 left",
    ]


@pytest.mark.parametrize(("share", "drawn"), [(-1, "[....]"), (0, "[....]"), (0.99, "[###.]"), (1, "[####]")])
def test_a_bar_is_full_only_at_the_end(share, drawn):
    assert draw(share, 4) == drawn


def test_units():
    assert [size(n) for n in (12, 1536, 2**20, 5 * 2**30)] == ["12 B", "1.5 KiB", "1.0 MiB", "5.0 GiB"]
    assert [duration(s) for s in (0.4, 59.6, 3605)] == ["0:00", "1:00", "60:05"]


def test_a_bar_is_overwritten_on_a_terminal_and_left_out_elsewhere():
    for isatty, text in ((True, "\x1b[Ktaugate: a [#.]\r\x1b[Ktaugate: done\n"), (False, "taugate: done\n")):
        terminal = Terminal(isatty)
        _write(terminal, "\ra [#.]")
        _write(terminal, "done")
        assert terminal.text == text
