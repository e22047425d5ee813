"""Learners' copies of lessons, and scripts, import from where things were before the package was put in order."""

import importlib
import subprocess
import sys
import warnings

import pytest

# What the code cells of the lessons said, without the lines that are still right.
LINES = """
from scratch_ddp.benchmark.fit import AlphaBeta
from scratch_ddp.benchmark.fit import fit
from scratch_ddp.benchmark.fit import load_machine
from scratch_ddp.benchmark.fit import save_machine
from scratch_ddp.benchmark.published_step import gradient_bytes
from scratch_ddp.benchmark.report import machine
from scratch_ddp.benchmark.sleeping_model import SleepingModel, scaled
from scratch_ddp.benchmark.timing import interleaved
from scratch_ddp.benchmark.timing import interleaved, spread_of
from scratch_ddp.cost import Backward, Wire
from scratch_ddp.cost import MB
from scratch_ddp.cost import STAGES, model_states
from scratch_ddp.cost import best_bucket, best_bucket_bytes
from scratch_ddp.cost import bucket_plan
from scratch_ddp.cost import bucketed, flat, per_parameter
from scratch_ddp.cost import measured_states
from scratch_ddp.cost import naive
from scratch_ddp.cost import ring_bytes, transfer_seconds
from scratch_ddp.cost import states_table
from scratch_ddp.data import load_pairs
from scratch_ddp.data import load_pairs, sentences
from scratch_ddp.data import tokenise
from scratch_ddp.ddp.hooks import HookedModule
from scratch_ddp.evaluation import score
from scratch_ddp.exercises import check, reveal, solution
from scratch_ddp.exercises import check, solution
from scratch_ddp.exercises import reveal
from scratch_ddp.exercises.lesson_08 import average_when_ready
from scratch_ddp.exercises.lesson_10 import sharded_step
from scratch_ddp.link import Link, linked_group
from scratch_ddp.link import Link, lone_rank
from scratch_ddp.link import PRESETS, lone_rank
from scratch_ddp.link import linked_group
from scratch_ddp.link import preset
from scratch_ddp.link.pace import take_time
from scratch_ddp.memory import memory_use
from scratch_ddp.memory import memory_use, process_limit
from scratch_ddp.models import SMOLLM2_360M, build_small
from scratch_ddp.models import load_model
from scratch_ddp.plots import Frame, ring_frames
from scratch_ddp.plots import Sweep, bucket_sweep
from scratch_ddp.plots import bandwidth_chart
from scratch_ddp.plots import disagreement_saw
from scratch_ddp.plots import gradient_arrows
from scratch_ddp.plots import holdings_atlas
from scratch_ddp.plots import losses_and_residuals
from scratch_ddp.plots import memory_curves
from scratch_ddp.plots import memory_strips
from scratch_ddp.plots import message_ladder
from scratch_ddp.plots import step_curves
from scratch_ddp.plots import time_chart
from scratch_ddp.plots import timeline_chart
from scratch_ddp.profiling import timeline
from scratch_ddp.residency import MemoryLedger
from scratch_ddp.sharding import Batches
from scratch_ddp.sharding import shard
from scratch_ddp.traffic import traffic
from scratch_ddp.watched_loop import try_out
""".strip().splitlines()
# These are still right, or import a module, which says where its names are once they are used.
SILENT = """
from scratch_ddp import exercises
from scratch_ddp.benchmark import collectives
from scratch_ddp.benchmark import published_step
from scratch_ddp.benchmark.collectives import measure
from scratch_ddp.collectives import false_ring_all_reduce, reduce, ring_all_reduce, star_broadcast, tree_broadcast
from scratch_ddp.collectives import send_recv
from scratch_ddp.ddp import BucketedDDP, FlatDDP, OverlappedDDP, SimpleDistributedDataParallelism
from scratch_ddp.ddp.bucketed import Bucket
from scratch_ddp.fsdp import FSDP
from scratch_ddp.mesh import get
from scratch_ddp.training import train
from scratch_ddp.zero import ShardedOptimizer, reduce_gradients
""".strip().splitlines()


@pytest.fixture(autouse=True)
def _nothing_imported_by_an_old_name():
    """A name warns once in a process: let each test be the first."""
    for name, module in list(sys.modules.items()):
        if type(module).__name__ == "MovedModule":
            del sys.modules[name]
            parent, _, last = name.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).pop(last, None)


def run(line: str) -> tuple[dict, list[warnings.WarningMessage]]:
    """The names that a line imports, and the warnings it gives, as in a fresh process."""
    names: dict = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(line, "<the learner's cell>", "exec"), names)
    imported = {name: value for name, value in names.items() if not name.startswith("__")}
    return imported, [warning for warning in caught if "scratch_ddp" in str(warning.message)]


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_the_lessons_imports_what_it_names_and_says_where_that_is(line):
    names, said = run(line)
    assert list(names) == names_in(line) and len(said) == len(names)
    for warning, (name, value) in zip(said, names.items(), strict=True):
        assert warning.filename == "<the learner's cell>" and warning.category is FutureWarning
        new_line = str(warning.message).partition("has moved: ")[2].partition(". The old name")[0]
        assert run(new_line)[0][name] is value


@pytest.mark.parametrize("line", SILENT)
def test_a_line_that_is_still_right_says_nothing(line):
    names, said = run(line)
    assert list(names) == names_in(line) and said == []


def names_in(line: str) -> list[str]:
    return [name.strip() for name in line.partition(" import ")[2].split(",")]


def test_a_name_warns_once():
    cell = "from scratch_ddp.traffic import traffic\n" * 3 + "import scratch_ddp.traffic as t\nt.traffic\nt.set_up\n"
    assert [warning.lineno for warning in run(cell)[1]] == [1, 6]


def test_names_of_one_old_module_are_in_several_places_now():
    names, said = run("from scratch_ddp.traffic import counted_as, set_up, traffic")
    assert [str(warning.message).split()[4] for warning in said] == [
        "scratch_ddp.common.accounting",
        "scratch_ddp.common.accounting",
        "scratch_ddp.instruments.traffic",
    ]
    assert run("from scratch_ddp.cost import FIRST_BUCKET_MB, MB, bucket_plan, naive")[0]["MB"] == 2**20


def test_a_module_of_names_is_looked_into_when_it_is_used():
    names, said = run("from scratch_ddp.benchmark import published_step\nx = published_step.gradient_bytes")
    assert len(said) == 1 and said[0].lineno == 2
    assert names["x"] is importlib.import_module("scratch_ddp.course.pages.published_step").gradient_bytes


@pytest.mark.parametrize("line", ["from scratch_ddp.traffic import nothing", "import scratch_ddp.never_there"])
def test_a_name_that_never_was_is_an_import_error(line):
    with pytest.raises(ImportError, match="nothing|never_there"):
        run(line)


def test_old_commands():
    def say(*arguments):
        return subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True)

    assert "--strategy" in say("scratch_ddp.train", "--help").stdout
    moved = say("scratch_ddp.exercises.notebooks")
    assert moved.returncode == 1 and "python3 -m scratch_ddp refresh" in moved.stderr
