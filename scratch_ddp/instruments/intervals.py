"""Intervals of time as (start, end) pairs: joined, cut out of one another, measured."""

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same time in ascending order, with intervals that touch or overlap joined into one."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def without(intervals: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """Return what is left of `intervals` outside `removed`, in ascending order."""
    holes = union(removed)
    left = []
    for start, end in union(intervals):
        for hole_start, hole_end in holes:
            if hole_start >= end:
                break
            if hole_start > start:
                left.append((start, hole_start))
            start = max(start, hole_end)
        if start < end:
            left.append((start, end))
    return left


def total_seconds(intervals: Iterable[Interval]) -> float:
    """How long the intervals are together. Time in which they overlap counts once."""
    return sum(end - start for start, end in union(intervals))


def exposed_seconds(compute: Iterable[Interval], communication: Iterable[Interval]) -> float:
    """Seconds of communication during which this rank does not compute: nothing hides them."""
    return total_seconds(without(communication, compute))
