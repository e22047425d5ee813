"""`import scratch_ddp`: its names, and what importing it costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import scratch_ddp
from scratch_ddp import context_parallel, ddp, experts, fsdp, mesh, pipeline, tensor_parallel, zero

HOMES = dict.fromkeys(("SimpleDistributedDataParallelism", "FlatDDP", "OverlappedDDP", "BucketedDDP"), ddp)
HOMES |= {"get": mesh, "cache_mesh": mesh, "FSDP": fsdp, "ShardedOptimizer": zero, "reduce_gradients": zero}
HOMES |= dict.fromkeys(("ColumnParallelLinear", "RowParallelLinear", "parallelize"), tensor_parallel)
HOMES |= dict.fromkeys(("ring_attention", "ulysses_attention"), context_parallel)
HOMES |= {"Pipeline": pipeline, "ExpertParallel": experts}


def test_every_name_is_there():
    assert set(scratch_ddp.__all__) == set(HOMES)
    assert set(dir(scratch_ddp)) >= {*HOMES, "load_ipython_extension"}
    for name, home in HOMES.items():
        assert getattr(scratch_ddp, name) is getattr(home, name)


def test_a_type_checker_sees_the_same_names():
    tree = ast.parse(Path(scratch_ddp.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    assert {alias.name for line in block.body for alias in line.names} == set(HOMES)
    assert Path(scratch_ddp.__file__).with_name("py.typed").exists()


def test_a_wrong_name_is_an_error():
    with pytest.raises(ImportError, match="NaiveDDP"):
        from scratch_ddp import NaiveDDP  # noqa: F401
    assert not hasattr(scratch_ddp, "NaiveDDP")


@pytest.mark.measures_time
def test_importing_it_is_quick_and_brings_nothing_else():
    code = (
        "import sys, time; began = time.process_time(); import scratch_ddp; "
        "print(time.process_time() - began, *{'torch', 'numpy', 'IPython'} & set(sys.modules))"
    )
    runs = [subprocess.check_output([sys.executable, "-c", code], text=True).split() for _ in range(5)]
    assert all(len(run) == 1 for run in runs), runs
    assert min(float(run[0]) for run in runs) < 0.1
