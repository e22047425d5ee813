"""α and β from measured times, and the file that keeps them."""

import math

import pytest

from scratch_ddp.instruments.bandwidth.alpha_beta import FILE, AlphaBeta, fit, key, load_machine, save_machine

SIZES = [2**10, 2**14, 2**17, 2**20, 2**24, 2**27]


def test_exact_times_give_back_their_line():
    found = fit(SIZES, [70e-6 + 0.4e-9 * size for size in SIZES])
    assert found.alpha == pytest.approx(70e-6, rel=1e-9) and found.beta == pytest.approx(0.4e-9, rel=1e-9)
    assert found.worst < 1e-9
    assert found.seconds(2**20) == pytest.approx(70e-6 + 0.4e-9 * 2**20)
    assert found.half_way == pytest.approx(70e-6 / 0.4e-9)


def test_small_sizes_count_as_much_as_large_ones():
    """20 % more at the largest size is 10 ms, 140 times all of the smallest message's 70 µs."""
    seconds = [70e-6 + 0.4e-9 * size for size in SIZES]
    seconds[-1] *= 1.2
    found = fit(SIZES, seconds)
    assert found.alpha == pytest.approx(70e-6, rel=0.05)
    assert found.beta == pytest.approx(0.4e-9, rel=0.2) and 0.05 < found.worst < 0.2


@pytest.mark.parametrize("sizes, seconds, says", [
    ([1, 2], [1.0, 2.0], "2 sizes"),
    ([8, 8, 8], [1.0, 1.1, 1.2], "1 sizes"),
    ([1, 2, 3], [1.0, 2.0], "3 sizes, but 2 times"),
    ([1, 2, 3], [1.0, 2.0, 0.0], "positive and finite, not 0.0"),
    ([1, 2, 3], [1.0, math.nan, 3.0], "positive and finite, not nan"),
    ([1, 2, -3], [1.0, 2.0, 3.0], "a size must be positive"),
    ([10, 20, 30], [3.0, 2.0, 1.0], "measure larger sizes"),
    ([10, 20, 30], [1.0, 3.0, 5.0], "measure smaller sizes"),
])  # fmt: skip
def test_what_no_line_can_be_made_of(sizes, seconds, says):
    with pytest.raises(ValueError, match=says):
        fit(sizes, seconds)


def test_kept_beside_what_was_kept_before(tmp_path):
    assert load_machine(folder=tmp_path) is None
    two, four = AlphaBeta(1e-5, 1e-9, (1, 2, 3), (0.1, 0.0, -0.1)), AlphaBeta(2e-5, 2e-9)
    save_machine({key("all_reduce", "gloo", 2): two}, tmp_path)
    save_machine({key("all_reduce", "nccl", 4): four}, tmp_path)
    assert load_machine(folder=tmp_path) == two
    assert load_machine(ranks=4, folder=tmp_path) == four
    assert load_machine(ranks=4, backend="gloo", folder=tmp_path) is None
    assert load_machine("broadcast", folder=tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("text", ["{", "[1]", '{"all_reduce, gloo, 2 ranks": {"alpha": 1}}', (
    '{"all_reduce, gloo, 2 ranks": {"alpha": -1.0, "beta": 1.0, "sizes": [], "residuals": []}}'
)])  # fmt: skip
def test_a_damaged_file_is_named(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ValueError, match=f"{FILE} is damaged .* delete it"):
        load_machine(folder=tmp_path)


def test_no_negative_alpha_or_beta():
    for alpha, beta in ((-1.0, 1.0), (1.0, math.inf), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="must be a finite number"):
            AlphaBeta(alpha, beta)
