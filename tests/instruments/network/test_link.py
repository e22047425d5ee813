"""Links, presets and linked groups: what they are made of, what they refuse, what they leave behind."""

import math
import os
import tempfile

import pytest
import torch
import torch.distributed as dist

from scratch_ddp.instruments.network import PRESETS, Link, linked_group, lone_rank, preset
from scratch_ddp.instruments.network import linked as linked_module
from tests.ranks import RankFailed, run_ranks


@pytest.fixture
def no_group_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_seconds():
    link = Link(0.5, 0.001, per_round=0.1)
    assert link.seconds(2000) == 2.5 and link.seconds(2000, rounds=3) == pytest.approx(2.8)
    assert link.wire(4).all_reduce(1000) == pytest.approx(link.seconds(1500, rounds=6))
    both = Link(0.5, 0.001, per_round=0.1, small=(0.2, 0.01, 0))  # a protocol for small messages
    assert both.seconds(100, rounds=3) == pytest.approx(0.2 + 0.03 + 0.2) and both.seconds(2000) == 2.5
    assert str(Link(145e-6, 1e-9 / 4, "T4")) == "T4: 145 µs per call, 4 GB/s"
    assert str(Link(0, 0)) == "link: 0 µs per call, any number of bytes at once"


@pytest.mark.parametrize("bad", [-1e-9, math.inf, math.nan, "fast"])
@pytest.mark.parametrize("name", ["alpha", "beta", "per_round"])
def test_a_bad_figure_is_named(name, bad):
    with pytest.raises(ValueError, match=f"{name} must be a finite number, 0 or more, not {bad!r}"):
        Link(**{"alpha": 0, "beta": 0, name: bad})


def test_every_preset_has_a_source_and_a_speed():
    for name, link in PRESETS.items():
        assert link.name == name and len(link.source) > 20
        assert 1e8 <= 1 / link.beta <= 1e12 and 0 < link.alpha < 1e-3
    gigabit = {name: 8e-9 / link.beta for name, link in PRESETS.items() if name.startswith("Ethernet")}
    assert all(name == f"Ethernet {round(speed)} Gb" for name, speed in gigabit.items())
    assert {"T4 over PCIe", "NVLink 4", "InfiniBand NDR", "Ethernet 10 Gb"} <= set(PRESETS)


def test_the_t4_preset_gives_the_published_all_reduces():
    wire = preset("T4 over PCIe").wire(2)
    for mb, published in ((10, 0.00270), (100, 0.0262), (1024, 0.269)):
        assert wire.all_reduce(mb * 2**20) == pytest.approx(published, rel=0.05)


def test_a_preset_that_does_not_exist():
    with pytest.raises(ValueError, match="no link 'Token Ring'; there are 'T4 over PCIe', .*'Ethernet 10 Gb'"):
        preset("Token Ring")


@pytest.mark.parametrize(
    ("size", "rank", "message"),
    [(0, 0, "world_size must be"), (2.0, 0, "world_size must be"), (4, 4, "rank must be one of 0 to 3, not 4")],
)
def test_a_lone_rank_of_no_group(size, rank, message):
    with pytest.raises(ValueError, match=message):
        lone_rank(size, "NVLink 4", rank)
    assert not dist.is_initialized()


def test_a_lone_rank_is_the_default_group_where_there_is_none(no_group_left):
    group = lone_rank(64, "Ethernet 10 Gb", rank=7)
    assert (dist.get_rank(), dist.get_world_size(), dist.group.WORLD) == (7, 64, group)
    further = lone_rank(4, None, rank=2)
    assert (dist.get_rank(further), dist.get_world_size(further)) == (2, 4)
    assert dist.get_process_group_ranks(further) == [0, 1, 7, 2]  # 7 is this process
    x = torch.ones(2)
    dist.broadcast(x, group=further, group_src=3)
    dist.destroy_process_group(further)
    pair = dist.new_group([1, 7])
    dist.all_reduce(x, group=pair)
    assert x.tolist() == [2, 2] and pair.link == group.link and dist.get_rank(pair) == 1
    dist.destroy_process_group()
    assert not dist.is_initialized()


def test_the_link_is_switched_in_a_line(no_group_left):
    group, x = lone_rank(2, Link(1e-4, 0, "first")), torch.ones(1)
    dist.all_reduce(x)
    group.link = None
    dist.all_reduce(x)
    group.link = "Ethernet 10 Gb"
    dist.all_reduce(x)
    assert group.link is PRESETS["Ethernet 10 Gb"] and x.item() == 8
    assert [transfer.ended - transfer.started for transfer in group.transfers] == pytest.approx(
        [1e-4, group.link.seconds(4, 2)], rel=1e-3
    )
    with pytest.raises(ValueError, match="no link 'Ethernet'; there are"):
        group.link = "Ethernet"
    with pytest.raises(TypeError, match="a Link, the name of a preset or None is needed, not float"):
        group.link = 1e-9
    assert group.link is PRESETS["Ethernet 10 Gb"]


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="no process group whose ranks could be linked"):
        linked_group("NVLink 4")


def test_what_is_refused():
    def refused():
        rank = dist.get_rank()
        pair, linked = dist.new_group([0, 1]), linked_group(None)
        messages = []
        for link, group in (("NVLink 4" if rank else "nothing", None), (1.0, None), (None, linked), (None, "dp")):
            with pytest.raises((ValueError, TypeError)) as raised:
                linked_group(link, group)
            messages.append(str(raised.value))
        if rank == 2:
            with pytest.raises(ValueError, match="rank 2 is not in the group"):
                linked_group(None, pair)
        else:
            linked_group(None, pair)
        return messages

    for messages in run_ranks(3, refused):
        assert messages[0].startswith("rank 0: there is no link 'nothing'; there are")  # on every rank
        assert messages[1].startswith("ranks 0, 1, 2: a Link, the name of a preset or None is needed, not float")
        assert messages[2] == "this group is on a link already: set its .link"
        assert messages[3].startswith("a process group or None is needed, not str")


def test_beside_nccl_the_data_moves_over_gloo():
    """NCCL lets ranks go on before the data is there. Here the default group only says that it is NCCL."""

    def beside():
        world = dist.distributed_c10d._world
        world.pg_backend_config[dist.group.WORLD] = "cpu:gloo,cuda:nccl"
        world.pg_map[dist.group.WORLD] = (dist.Backend("nccl"), world.pg_map[dist.group.WORLD][1])
        linked, x = linked_group(Link(0.001, 0)), torch.ones(1)
        dist.all_reduce(x, group=linked)
        return x.item(), dist.get_backend(linked), linked._device_types[0].type

    assert run_ranks(2, beside) == [(2, "gloo", "cpu")] * 2


@pytest.mark.parametrize(
    "config, expected", [("cuda:nccl", "gloo"), ("cpu:interruptible,cuda:interruptible", "interruptible")]
)
def test_over_which_backend(config, expected, monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert linked_module._backend_on_cpu(None) == expected


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_destroyed_is_gone(whole, tmp_path):
    def made_and_destroyed():
        tempfile.tempdir = str(tmp_path)
        world = dist.distributed_c10d._world
        before = len(world.pg_map), len(world.pg_names), len(world.tags_to_pg[""])
        linked = linked_group("NVLink 4", None if whole else dist.group.WORLD)
        dist.all_reduce(torch.ones(1), group=linked)
        dist.destroy_process_group(linked)
        assert (len(world.pg_map), len(world.pg_names), len(world.tags_to_pg[""])) == before
        x = torch.ones(1)
        dist.all_reduce(x)
        again = linked_group("NVLink 4")
        dist.all_reduce(x, group=again)
        dist.barrier()
        return x.item()

    assert run_ranks(2, made_and_destroyed) == [4, 4]
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_have_different_numbers_of_groups():
    """torch names a group of some ranks by that number, and waits for ever where the names differ."""

    def on_rank():
        dist.new_group([1, 2])
        first_two = dist.new_group([0, 1])
        if dist.get_rank() == 2:
            return None
        x = torch.ones(1)
        for _ in range(2):
            dist.all_reduce(x, group=linked_group("NVLink 4", first_two))
        return x.item()

    assert run_ranks(3, on_rank, timeout=20) == [4, 4, None]


def test_a_rank_that_dies_is_gloos_error():
    def outlive():
        linked = linked_group(Link(0.001, 0))
        if dist.get_rank() == 1:
            os._exit(0)
        with pytest.raises(RuntimeError, match="closed by peer|reset by peer|Connection"):
            dist.all_reduce(torch.ones(1), group=linked)
        raise ValueError("rank 0 went on")

    with pytest.raises(RankFailed) as failed:
        run_ranks(2, outlive)
    assert "rank 0 went on" in failed.value.failures[0]
