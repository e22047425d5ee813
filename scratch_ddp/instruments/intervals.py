"""Intervals of time as (start, end) pairs: joined, cut out of one another, measured."""

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in ascending order, with intervals that touch or overlap joined into one."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def without(intervals: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """Return what is left of `intervals` outside `removed`, in ascending order."""
    left, holes = [], union(removed)
    for start, end in union(intervals):
        for hole_start, hole_end in holes:
            if start < hole_start < end:
                left.append((start, hole_start))
            if hole_start < end:
                start = max(start, hole_end)
        if start < end:
            left.append((start, end))
    return left


def total_seconds(intervals: Iterable[Interval]) -> float:
    """How long the intervals are together. Time in which they overlap counts once."""
    return sum(end - start for start, end in union(intervals))
