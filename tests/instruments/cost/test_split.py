"""The forecast of a model that is split, against steps worked out by hand."""

import math

import pytest

from scratch_ddp.instruments.cost import Wire, pipelined, tensor_parallel
from scratch_ddp.pipeline import gpipe, one_f_one_b, zb_h1

FAST, SLOW = Wire(0, 0, 2), Wire(0.5, 0.001, 2, per_round=0.25)


def test_a_message():
    assert SLOW.message(1000) == 0.5 + 0.25 + 1.0


def test_tensor_parallel():
    assert tensor_parallel(3.0, 4, 1000, FAST) == 3.0
    assert tensor_parallel(3.0, 4, 1000, SLOW) == 3.0 + 4 * (
        0.5 + 2 * 0.25 + 1.0
    )  # two rounds, as many bytes as summed


def test_pipelined_without_a_wire_has_the_bubble_of_the_schedule():
    for schedule in (gpipe(4, 8), one_f_one_b(4, 8)):
        assert pipelined(schedule, 1, 2, 1000, FAST) == 3 * (8 + 4 - 1)
    assert pipelined(zb_h1(4, 8), 1, 2, 1000, FAST) == 3 * 8 + 4 - 1


def test_pipelined_with_a_wire():
    """One micro-batch on two ranks: forward, message, forward, backward, message, backward."""
    assert pipelined(one_f_one_b(2, 1), 1, 2, 1000, SLOW) == 2 * 1 + 2 * 2 + 2 * 1.75


@pytest.mark.parametrize("bad", [-1, math.inf, math.nan, None])
def test_a_bad_figure_is_named(bad):
    for name in ("compute", "all_reduces", "nbytes"):
        with pytest.raises(ValueError, match=f"{name} must be a finite number"):
            tensor_parallel(**({"compute": 1, "all_reduces": 1, "nbytes": 1} | {name: bad}), wire=FAST)
    for name in ("forward", "backward", "nbytes"):
        with pytest.raises(ValueError, match=f"{name} must be a finite number"):
            pipelined(gpipe(2, 2), **({"forward": 1, "backward": 1, "nbytes": 1} | {name: bad}), wire=FAST)
