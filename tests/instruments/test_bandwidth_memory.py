"""What does not fit in memory is refused before anything is allocated, with what would."""

import pytest
import torch

from scratch_ddp.instruments.bandwidth import free_memory as memory_module
from scratch_ddp.instruments.bandwidth.free_memory import Place, check_fits, free_memory, places
from scratch_ddp.instruments.bandwidth.operations import OPERATIONS, memory_needed
from scratch_ddp.instruments.sizes import UNITS, format_size, parse_size, three_digits
from tests.ranks import run_ranks

MIB, GIB = UNITS["MiB"], UNITS["GiB"]


def test_the_limit_of_a_cgroup_counts_and_files_in_memory_can_be_dropped(tmp_path):
    group = tmp_path / "user" / "job"
    group.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/user/job\n")
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1\n")
    parent = group.parent
    for name, text in (
        ("max", f"{100 * MIB}"),
        ("current", f"{80 * MIB}"),
        ("stat", f"anon 1\ninactive_file {30 * MIB}"),
    ):
        (parent / f"memory.{name}").write_text(f"{text}\n")
    assert free_memory(tmp_path, tmp_path / "own") == 50 * MIB


def test_the_older_kind_of_cgroup(tmp_path):
    group = tmp_path / "memory" / "job"
    group.mkdir(parents=True)
    (tmp_path / "own").write_text("3:cpu,cpuacct:/elsewhere\n2:memory:/job\n")
    for name, text in (("limit_in_bytes", 7 * MIB), ("usage_in_bytes", 3 * MIB), ("stat", "total_inactive_file 0")):
        (group / f"memory.{name}").write_text(f"{text}\n")
    assert free_memory(tmp_path, tmp_path / "own") == 4 * MIB


def test_without_cgroups_the_machine_counts(tmp_path):
    assert free_memory(tmp_path, tmp_path / "none") > 10 * MIB


def test_says_what_is_needed_and_what_would_fit():
    one_machine = [Place(1, 10 * GIB)] * 4
    with pytest.raises(ValueError) as refused:
        check_fits([MIB, 3 * GIB, GIB], [2, 4], one_machine, lambda size, n: 2 * size)
    text = str(refused.value)
    assert "3 GiB on 4 ranks does not fit" in text and "need 24 GiB (6 GiB each)" in text
    assert "9 GiB may be used" in text and "1 MiB, 1 GiB would" in text and "about 1.12 GiB" in text
    check_fits([GIB], [2, 4], one_machine, lambda size, n: 2 * size)


def test_ranks_on_other_machines_have_memory_of_their_own():
    two_machines = [Place(1, 10 * GIB), Place(2, 10 * GIB), Place(1, 10 * GIB), Place(2, 10 * GIB)]
    check_fits([2 * GIB], [4], two_machines, lambda size, n: 2 * size)
    with pytest.raises(ValueError, match="2 of them share"):
        check_fits([3 * GIB], [4], two_machines, lambda size, n: 2 * size)


def test_ranks_of_one_machine_know_that_they_share_it(monkeypatch):
    """The smallest figure counts: ranks look one after another, while others allocate."""

    def look():
        import torch.distributed as dist

        monkeypatch.setattr(memory_module, "free_memory", lambda: 1000 + dist.get_rank())
        return places(torch.device("cpu"), None)

    first, second = run_ranks(2, look)
    assert first == second and len(set(first)) == 1 and first[0].free == 1000


def test_memory_of_several_operations_is_that_of_the_one_that_takes_most():
    chosen = [OPERATIONS[name] for name in ("all_reduce", "all_to_all", "all_gather")]
    assert memory_needed(chosen[:1], GIB, 2) == round(1.6 * GIB)  # the tensor, a part, a tenth
    assert memory_needed(chosen, GIB, 2) == round((1 + 0.5 + 1 + 1.1) * GIB)


@pytest.mark.parametrize(
    "text, size", [("1KiB", 1024), ("1 kb", 1000), ("1.5MiB", 1572864), ("1024MiB", GIB), ("77", 77), (12, 12)]
)
def test_sizes_with_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "0", "1.5", "3 XB", "1e3"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="size"):
        parse_size(text)
    with pytest.raises(TypeError, match="number of bytes"):
        parse_size(1.5)


def test_sizes_in_words_are_exact():
    texts = [format_size(size) for size in (1024, 1000, 10**8, 100 * MIB, GIB, 1500, 5)]
    assert texts == ["1 KiB", "1 KB", "100 MB", "100 MiB", "1 GiB", "1,500 B", "5 B"]


def test_three_digits_are_written_out():
    assert [three_digits(value) for value in (0.003236, 12.44, 999.4, 999.7, 2093.0, 0)] == [
        "0.00324", "12.4", "999", "1,000", "2,090", "0"
    ]  # fmt: skip
