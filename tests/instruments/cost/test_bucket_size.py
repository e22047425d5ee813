"""The best bucket size: the formula is the minimum of its own U, U is what the queue gives, the search finds it."""

import math
import random

import pytest

from scratch_ddp.common.tensors import MB
from scratch_ddp.instruments.cost import Backward, Wire, best_bucket, best_bucket_bytes, bucketed, exposed_by_formula

CASES = [
    # alpha, seconds on the wire for all bytes, backward
    (0.001, 2.0, 1.0),  # the wire is the bottleneck
    (0.001, 1.0, 1.0),  # in balance
    (0.001, 0.5, 1.0),  # the compute is
    (0.1, 0.2, 1.0),  # messages are dear
    (1e-6, 0.999, 1.0),
]


@pytest.mark.parametrize(("alpha", "all_bytes", "seconds"), CASES)
def test_the_formula_is_the_minimum(alpha, all_bytes, seconds):
    n = 1000 * MB
    wire = Wire(alpha, all_bytes / n, 2)
    best = best_bucket_bytes(wire, n, seconds)
    least = exposed_by_formula(wire, n, seconds, best)
    for factor in (0.25, 0.5, 0.9, 0.99, 1.01, 1.1, 2, 4):
        if best * factor <= n:
            assert exposed_by_formula(wire, n, seconds, best * factor) > least


def test_in_balance_it_is_the_root_of_alpha_n_over_beta():
    n, beta, alpha = 10**9, 1e-9, 1e-4
    assert best_bucket_bytes(Wire(alpha, beta, 2), n, beta * n) == pytest.approx(math.sqrt(alpha * n / beta))


def test_more_ranks_count():
    n, two = 10**9, best_bucket_bytes(Wire(1e-4, 1e-9, 2), 10**9, 1.2)
    assert best_bucket_bytes(Wire(1e-4, 2e-9 / 3, 4), n, 1.2) == pytest.approx(two)  # 2·3/4 of β each
    slow_rounds = Wire(0, 1e-9, 2, per_round=0.5e-4)
    assert best_bucket_bytes(slow_rounds, n, 1.2) == pytest.approx(two)


def test_ends_of_the_scale():
    assert best_bucket_bytes(Wire(0, 1e-9, 2), 10**9, 1) == 0  # a message costs nothing: cut as you like
    assert best_bucket_bytes(Wire(1e-3, 1e-9, 1), 10**9, 1) == 0  # and for a rank alone there is none
    assert best_bucket_bytes(Wire(1e-3, 1e-9, 2), 10**9, 0) == 10**9  # nothing to hide behind: one message
    assert best_bucket_bytes(Wire(100, 1e-9, 2), 10**9, 1) == 10**9
    assert exposed_by_formula(Wire(1, 1, 2), 0, 1, 10) == 0


@pytest.mark.parametrize("bad", [-1, math.inf, math.nan])
def test_bad_figures(bad):
    with pytest.raises(ValueError, match="nbytes"):
        best_bucket_bytes(Wire(1, 1, 2), bad, 1)
    with pytest.raises(ValueError, match="seconds"):
        best_bucket_bytes(Wire(1, 1, 2), 1, bad)
    with pytest.raises(ValueError, match="bucket_bytes"):
        exposed_by_formula(Wire(1, 1, 2), 1, 1, bad)
    with pytest.raises(ValueError, match="more than 0"):
        exposed_by_formula(Wire(1, 1, 2), 1, 1, 0)


@pytest.mark.parametrize(("alpha", "all_bytes", "seconds"), CASES)
@pytest.mark.parametrize("grains", [1, 5, 50, 500])
def test_the_queue_gives_what_the_formula_says(alpha, all_bytes, seconds, grains):
    """1000 gradients of 1 MB that arrive evenly; buckets of as many grains, all of one size."""
    backward = Backward.in_proportion([MB] * 1000, seconds)
    wire = Wire(alpha, all_bytes / backward.total_bytes, 2)
    exposed = bucketed(backward, wire, grains, first_mb=grains).exposed
    assert exposed == pytest.approx(exposed_by_formula(wire, backward.total_bytes, seconds, grains * MB), abs=1e-9)


def test_the_search_finds_the_formulas_size():
    backward = Backward.in_proportion([MB // 8] * 8000, 1.0)
    for alpha, all_bytes in ((0.001, 2.0), (0.001, 0.9), (0.01, 0.5)):
        wire = Wire(alpha, all_bytes / backward.total_bytes, 2)
        size, forecast = best_bucket(backward, wire, first_mb=1000)
        by_formula = best_bucket_bytes(wire, backward.total_bytes, 1.0)
        least = exposed_by_formula(wire, backward.total_bytes, 1.0, by_formula)
        assert forecast.step == pytest.approx(1 + least, rel=0.002)
        assert 0.8 < size * MB / by_formula < 1.6  # the largest of those that are as good


def test_the_search_beats_every_size_of_a_random_model():
    chance = random.Random(1)
    for _ in range(10):
        sizes = [round(MB * 10 ** chance.uniform(-3, 1.5)) for _ in range(100)]
        backward = Backward.in_proportion(sizes, 0.5)
        wire = Wire(10 ** chance.uniform(-5, -2), 10 ** chance.uniform(-10, -8), 8)
        _, forecast = best_bucket(backward, wire)
        steps = [bucketed(backward, wire, 2.0**k).step for k in range(-8, 10)]
        assert forecast.step <= 1.005 * min(steps)


def test_a_bucket_without_end():
    """As with BucketedDDP(model, math.inf): all that follows the first bucket travels at once."""
    backward, wire = Backward.in_proportion([MB] * 10, 1.0), Wire(1e-3, 1e-9, 2)
    assert bucketed(backward, wire, math.inf) == bucketed(backward, wire, 100)
    assert [each.nbytes // MB for each in bucketed(backward, wire, math.inf).all_reduces] == [1, 9]
    assert [each.nbytes // MB for each in bucketed(backward, wire, math.inf, first_mb=math.inf).all_reduces] == [10]
