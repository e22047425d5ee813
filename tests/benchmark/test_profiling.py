"""The benchmark of profiles: a fault that is missed, or parts that don't add up, miss the target."""

import pytest

from scratch_ddp.benchmark.profiling import Found, rows
from scratch_ddp.course.pages.planted_faults import FAULTS


@pytest.mark.parametrize(
    ("second", "missed"),
    [
        (Found(True, True, [1.0]), []),
        (Found(False, True, [1.0]), [1]),
        (Found(True, True, [1.0, 0.98]), [0]),
    ],
)
def test_what_was_missed_is_shown(second, missed):
    good = Found(True, True, [1.0, 1.001])
    results = [[[good] * len(FAULTS)], [[second, *[good] * (len(FAULTS) - 1)]]]
    table = rows(results, busy=True)
    assert [place for place, row in enumerate(table) if not row.holds] == missed
    assert table[1].measured == f"{0 if 1 in missed else 1} of 1"
