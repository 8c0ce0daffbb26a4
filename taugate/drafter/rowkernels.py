"""Triton kernels over rows of logits, one program each; `rowstats` says what they give."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_stats(logits, truth, peaks, ranks, totals, vocabulary, stride, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    target = tl.load(truth + row)
    own = tl.load(logits + row * stride + tl.maximum(target, 0)).to(tl.float32)
    peak = tl.full([WIDTH], -float("inf"), tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    before = tl.zeros([WIDTH], tl.int32)
    for begin in range(0, vocabulary, WIDTH):
        at = begin + lane
        x = tl.load(logits + row * stride + at, mask=at < vocabulary, other=-float("inf")).to(tl.float32)
        before += tl.where(x <= own, 0, 1) + tl.where((x == own) & (at < target), 1, 0)
        now = tl.maximum(peak, x)
        level = tl.where(now == -float("inf"), 0.0, now)  # a pruned vocabulary may have nothing here
        total = total * tl.exp(peak - level) + tl.exp(x - level)
        peak = now
    tl.store(peaks + row * WIDTH + lane, peak)
    tl.store(ranks + row, tl.where(target < 0, -1, tl.sum(before)))
    highest = tl.max(peak)
    tl.store(totals + row, highest + tl.log(tl.sum(total * tl.exp(peak - highest))))


@triton.jit
def _ordered(x):
    """Integers in the order of the numbers `x`; the other way round, numbers of such integers."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _reaching(row, vocabulary, least, out, WIDTH: tl.constexpr, ROOM: tl.constexpr):
    """How many logits of `row` are at least `least` in order; ROOM of them go to `out`, if there is any room.

    Each lane counts its own, so that all lanes have to agree but once; that is worth a second reading.
    """
    lane = tl.arange(0, WIDTH)
    mine = tl.zeros([WIDTH], tl.int32)
    for begin in range(0, vocabulary, WIDTH):
        at = begin + lane
        x = tl.load(row + at, mask=at < vocabulary, other=0).to(tl.float32)
        mine += ((at < vocabulary) & (_ordered(x) >= least)).to(tl.int32)
    if ROOM > 0:
        place = tl.cumsum(mine, 0) - mine
        for begin in range(0, vocabulary, WIDTH):
            at = begin + lane
            x = tl.load(row + at, mask=at < vocabulary, other=0).to(tl.float32)
            hit = (at < vocabulary) & (_ordered(x) >= least)
            tl.store(out + place, x, mask=hit & (place < ROOM))
            place += hit.to(tl.int32)
    return tl.sum(mine)


@triton.jit
def largest(logits, peaks, found, vocabulary, stride, count, WIDTH: tl.constexpr, ROOM: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    row, out = logits + number * stride, found + number * ROOM
    order = _ordered(tl.load(peaks + number * WIDTH + tl.arange(0, WIDTH)))
    # The largest integer that `count` of them reach is between `least` and `beyond`.
    least, beyond = tl.full([], -(2**31), tl.int64), tl.full([], 2**31, tl.int64)
    for _ in range(32):
        middle = (least + beyond) >> 1
        enough = tl.sum((order >= middle.to(tl.int32)).to(tl.int32)) >= count
        least, beyond = tl.where(enough, middle, least), tl.where(enough, beyond, middle)
    many = _reaching(row, vocabulary, least.to(tl.int32), out, WIDTH, ROOM)
    rest = tl.full([], -float("inf"), tl.float32)
    if many > ROOM:  # many in one group, or equal ones: those beyond the count-th logit, and as many like it
        beyond = tl.full([], 2**31, tl.int64)
        while beyond - least > 1:
            middle = (least + beyond) >> 1
            enough = _reaching(row, vocabulary, middle.to(tl.int32), out, WIDTH, 0) >= count
            least, beyond = tl.where(enough, middle, least), tl.where(enough, beyond, middle)
        rest = _ordered(least.to(tl.int32).to(tl.float32, bitcast=True)).to(tl.float32, bitcast=True)
        many = tl.full([], 0, tl.int32)
        if beyond < 2**31:
            many = _reaching(row, vocabulary, beyond.to(tl.int32), out, WIDTH, ROOM)
    item = tl.arange(0, ROOM)
    tl.store(out + item, tl.zeros([ROOM], tl.float32) + rest, mask=item >= many)
