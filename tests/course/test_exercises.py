"""References and other right answers pass, honest mistakes are refused for the right reason, stubs are for people.

One group of ranks judges all answers of a lesson in a row: so each also shows that the one before left the process
group working. A lesson brings its exercises and their answers, and nothing else.
"""

import ast
import importlib
import pkgutil
from operator import itemgetter

import pytest
import torch.distributed as dist

from scratch_ddp.cells.rank import interruptible_group
from scratch_ddp.cells.rank.interruptible_group import BACKEND
from scratch_ddp.course import lessons
from scratch_ddp.course.arena import Arena
from scratch_ddp.course.check import SECONDS
from scratch_ddp.course.exercise import all_exercises
from scratch_ddp.course.run import NOT_WRITTEN
from tests.course.answers import all_answers, examined, on_ranks

EXERCISES, ANSWERS = all_exercises(), all_answers()
HANG = 2.0  # seconds; a hang is bounded by more in a notebook
LESSONS = {
    each.name: [exercise.name for exercise in importlib.import_module(f"{lessons.__name__}.{each.name}").EXERCISES]
    for each in pkgutil.iter_modules(lessons.__path__)
}


@pytest.mark.parametrize("lesson", LESSONS)
@pytest.mark.parametrize(("n", "backend"), [(2, BACKEND), (3, "gloo"), (4, BACKEND)])
def test_right_answers_pass_and_mistakes_are_refused_for_the_right_reason(lesson, n, backend):
    cells = [(name, EXERCISES[name].answer_cell(), "", "") for name in LESSONS[lesson]]
    if n == 3:
        cells += [(name, EXERCISES[name].stub_cell(), "written", "not written yet") for name in LESSONS[lesson]]
    answers = [each for each in ANSWERS if each.name in LESSONS[lesson] and (n in each.n or not each.fails)]
    cells += [(each.name, each.cell(EXERCISES[each.name]), each.fails, each.says) for each in answers]

    def verdicts():
        return [
            examined(source, name, HANG if fails == "runs" and "raised" not in says else SECONDS)
            for name, source, fails, says in cells
        ]

    for (_, source, fails, says), verdict in zip(cells, on_ranks(n, verdicts, backend, timeout=300), strict=True):
        assert says in verdict.get(fails, "") if fails else not any(verdict.values()), (source, says, verdict)
        assert "is gone" not in str(verdict), "for a reason that another criterion says"


def test_a_check_keeps_its_group_for_the_next_unless_a_call_failed_or_a_rank_has_it_no_more():
    right, raises = (
        EXERCISES["f_and_g"].answer_cell(write) for write in (itemgetter("answer"), lambda _: "    1 / 0\n")
    )

    def groups():
        made = []
        for source in (right, right, raises, right, right):
            if len(made) == 4 and dist.get_rank() == 0:  # as on a rank that has replaced another
                dist.destroy_process_group(Arena.group)
            failed = any(examined(source, "f_and_g").values())
            made.append((Arena.group.uid, failed))
        assert Arena.group not in interruptible_group._current_groups(), "a Stop would renew it, or say that it is lost"
        return made, len(dist.distributed_c10d._world.pg_names)

    made, left = on_ranks(3, groups)
    assert [failed for _, failed in made] == [False, False, True, False, False]
    assert made[0][0] == made[1][0] == made[2][0] and len({uid for uid, _ in made}) == 3 and left == 2


def test_a_rank_that_comes_late_to_a_stub_still_comes_to_it():
    late = "    import time\n\n    time.sleep(0.5 * (dist.get_rank() == 0))\n    raise NotImplementedError\n"
    stub = EXERCISES["f_and_g"].answer_cell(lambda _: late)
    assert on_ranks(2, lambda: examined(stub, "f_and_g")) == {"written": NOT_WRITTEN}


@pytest.mark.parametrize("name", EXERCISES)
def test_a_stub_is_for_people_and_its_check_knows_honest_mistakes(name):
    """What is asked in at most five lines that a notebook shows whole, the cost if it counts, nothing of the answer."""
    source, wrong = EXERCISES[name].stub_cell(), [each for each in ANSWERS if each.name == name and each.fails]
    definition = ast.parse(source).body[-1]
    said = [line for line in ast.get_docstring(definition).splitlines() if line]
    assert definition.name == name and len(said) <= 5 and max(map(len, source.splitlines())) <= 88
    assert "raise NotImplementedError  # your code" in source and "end of the answer" not in source
    assert len(wrong) >= 3 and ("Cost:" in source or "cost" not in {each.fails for each in wrong})
