"""Whose `check` and whose answer a learner's notebook uses."""

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from scratch_ddp.commands.lessons import lesson_paths
from scratch_ddp.commands.own_work import unearned
from scratch_ddp.commands.stubs import write_answers
from scratch_ddp.course.exercise import all_exercises

GIVEN = "from scratch_ddp.course import check, solution"
MINE = "def reduce(tensor, dst=0, group=None):\n    dist.reduce(tensor, dst, group=group)"
CHECK = "check(reduce)"


def reasons(*cells: str, lesson: tuple[str, ...] = ()) -> dict[str, str]:
    notebook, original = (new_notebook(cells=[new_code_cell(cell) for cell in each]) for each in (cells, lesson))
    return unearned(notebook, all_exercises(), original)


@pytest.mark.parametrize(
    "cell",
    [
        "def check(f):\n    print('✓ value')",
        "check = print",
        "from mine import check",
        "from scratch_ddp.course import reveal as check",
        "%%rank [0-3]\ncheck = print",
        "def sly():\n    global check\n    check = print\nsly()",
        "for check in [print]:\n    pass",
        "from scratch_ddp.course import check\ncheck = print",
    ],
)
def test_a_check_of_its_own_is_named(cell):
    assert reasons(GIVEN, cell, MINE, CHECK) == {"reduce": "cell 2 redefines check"}


@pytest.mark.parametrize(
    "cell", ["import scratch_ddp.course.check as c\nc.examine = print", "solution.__code__ = print.__code__"]
)
def test_a_change_of_the_package_is_named(cell):
    assert reasons(GIVEN, cell, MINE, CHECK) == {"reduce": "cell 2 changes scratch_ddp"}


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (["from scratch_ddp.collectives import reduce"], "cell 3 checks scratch_ddp.collectives.reduce"),
        (["from scratch_ddp import collectives", "reduce = collectives.reduce"], "cell 3 uses scratch_ddp.collectives"),
        (["import scratch_ddp.collectives as c\nreduce = c.reduce"], "cell 2 uses scratch_ddp.collectives"),
        (
            ["def reduce(t, dst=0, group=None):\n    from scratch_ddp.collectives import reduce as r\n    r(t, dst)"],
            "cell 2 uses scratch_ddp.collectives.reduce",
        ),
        (
            ["from scratch_ddp.collectives import reduce as r", "def reduce(t, dst=0, group=None):\n    r(t, dst)"],
            "cell 3 uses scratch_ddp.collectives.reduce",
        ),
        (
            ["import scratch_ddp.collectives\n" + MINE.replace("dist.", "scratch_ddp.collectives.")],
            "cell 2 uses scratch_ddp.collectives",
        ),
        (["from scratch_ddp.collectives import *"], "cell 2 uses scratch_ddp.collectives.*"),
    ],
)
def test_an_answer_that_is_the_packages_is_named(cells, reason):
    assert reasons(GIVEN, *cells, CHECK) == {"reduce": reason}


@pytest.mark.parametrize(
    "cell",
    [
        MINE,
        "from scratch_ddp.instruments.traffic import traffic\n" + MINE + "\nwith traffic() as seen:\n    reduce(x)",
        "from scratch_ddp import collectives\n" + MINE + "\n    collectives = [tensor]\n    return collectives",
        "from scratch_ddp import get\n" + MINE.replace("group=group", "group=get('pg')"),
        "def helper():\n    check = 1\n    return check\n" + MINE,
        "this is no Python",
        "return 7",
    ],
)
def test_an_answer_of_ones_own_counts(cell):
    assert reasons(GIVEN, cell, CHECK) == {}


def test_what_the_lesson_itself_does_counts():
    given = "from scratch_ddp.collectives import reduce\nreduce(x)"
    assert reasons(given, GIVEN, MINE, CHECK, lesson=(given, GIVEN)) == {}
    not_written = reasons(given, GIVEN, CHECK, lesson=(given, GIVEN))
    assert not_written == {"reduce": "cell 3 checks scratch_ddp.collectives.reduce"}


@pytest.mark.parametrize("path", lesson_paths(), ids=lambda path: path.stem)
def test_the_reference_answers_count_in_every_lesson(path):
    lesson, solved = (nbformat.read(path, as_version=4) for _ in range(2))
    write_answers(solved)
    assert unearned(solved, all_exercises(), lesson) == {}
