"""Stretches of time as (start, end) pairs: put together, cut out of one another, measured."""

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same stretches in ascending order, those that touch or overlap as one."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def without(intervals: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """Return what is left of `intervals` outside of `removed`, in ascending order."""
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


def seconds(intervals: Iterable[Interval]) -> float:
    """How long the stretches are together; what overlaps counts once."""
    return sum(end - start for start, end in union(intervals))


def exposed_seconds(compute: Iterable[Interval], communication: Iterable[Interval]) -> float:
    """Seconds in which something is on the wire and this rank does not compute: communication that nothing hides."""
    return seconds(without(communication, compute))
