"""Wrong answers to the exercises of lesson 13."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "one_f_one_b": (
        WrongAnswer(
            "GPipe",
            fails="memory",
            says="p = 4, m = 8: the most activations that rank 0 holds is 8, should be 4",
            body="""
                for r, row in enumerate(rows):
                    row += [Action(kind, r, i) for kind in "FB" for i in range(m)]
            """,
        ),
        WrongAnswer(
            "no forwards ahead",
            fails="time",
            says="p = 4, m = 8: its length in units is 96.0, should be 33.0",
            edits={"min(p - 1 - r, m)": "0"},
        ),
        WrongAnswer(
            "as many ahead on every rank",
            fails="memory",
            says="the most activations that rank 1 holds is 4, should be 3",
            edits={"min(p - 1 - r, m)": "min(p - 1, m)"},
        ),
        WrongAnswer(
            "the first ranks have the fewest ahead",
            fails="value",
            says="the schedule deadlocks: rank 0, at B0 of stage 0, waits for",
            edits={"min(p - 1 - r, m)": "min(r, m)"},
        ),
        WrongAnswer(
            "fewer micro-batches than ranks are not thought of",
            fails="value",
            says="p = 4, m = 2: F2 of stage 0 does not belong into a schedule of 2 micro-batches",
            edits={"min(p - 1 - r, m)": "p - 1 - r"},
        ),
        WrongAnswer(
            "the forwards run out, and the last backwards with them",
            fails="value",
            says="B5 of stage 0 is missing",
            edits={
                '            row.append(Action("B", r, i))': '                row.append(Action("B", r, i))',
            },
        ),
        WrongAnswer(
            "backward before forward",
            fails="value",
            says="rank 3, at B0 of stage 3, waits for the output of stage 3",
            body="""
                for r, row in enumerate(rows):
                    ahead = min(p - 1 - r, m)
                    row += [Action("F", r, i) for i in range(ahead)]
                    for i in range(m):
                        row.append(Action("B", r, i))
                        if ahead + i < m:
                            row.append(Action("F", r, ahead + i))
            """,
        ),
    ),
    "zero_bubble": (
        WrongAnswer(
            "each W at once",
            fails="time",
            says="p = 4, m = 8: its length in units is 30.0, should be 27.0",
            edits={"i >= r": "i >= 0", 'Action("W", stage, i - r)': 'Action("W", stage, i)', "range(m - r, m)": "()"},
        ),
        WrongAnswer(
            "every W at the end",
            fails="memory",
            says="p = 4, m = 8: the most activations that rank 0 holds is 8, should be 4",
            edits={"i >= r": "False", "range(m - r, m)": "range(m)"},
        ),
        WrongAnswer(
            "the last weights' gradients are forgotten",
            fails="value",
            says="W7 of stage 1 is missing",
            edits={"range(m - r, m)": "()"},
        ),
        WrongAnswer(
            "W before its I",
            fails="value",
            says="the schedule deadlocks: rank 0, at W0 of stage 0, waits for the gradient of stage 0",
            body="""
                rows = []
                for r, whole in enumerate(schedules.one_f_one_b(p, m)):
                    row = []
                    for kind, stage, i in whole:
                        row += [Action("W", r, i), Action("I", r, i)] if kind == "B" else [Action("F", r, i)]
                    rows.append(row)
                return rows
            """,
        ),
        WrongAnswer(
            "1F1B as it is",
            fails="value",
            says="row 0 has B0 of stage 0, should have F, I, W of stage 0 alone",
            body="return schedules.one_f_one_b(p, m)",
        ),
    ),
    "who_is_stuck": (
        WrongAnswer(
            "one pass only",
            fails="value",
            says="the result",
            edits={"                progress = True": "                progress = False"},
        ),
        WrongAnswer(
            "backward without the next stage's",
            fails="value",
            says="each waits for the other: the result has 0 entries, should have 2",
            edits={' | ({Action("B", stage + 1, i)} if stage < last else set())': ""},
        ),
        WrongAnswer(
            "backward without its own forward",
            fails="value",
            says="a backward before its own forward: the result has 0 entries, should have 2",
            edits={
                'return {Action("F", stage, i)} | ({Action("B", stage + 1, i)} if stage < last else set())': (
                    'return {Action("B", stage + 1, i)} if stage < last else set()'
                )
            },
        ),
        WrongAnswer(
            "the number of ranks for that of stages",
            fails="value",
            says="some finish, some don't: the result",
            edits={"if stage < last else": "if stage < len(rows) - 1 else"},
        ),
        WrongAnswer(
            "the rank's number for the stage's",
            fails="value",
            says="some finish, some don't: the result",
            edits={
                "    done = set()": "    done = set()\n"
                "    rows = [[Action(kind, r, i) for kind, _, i in row] for r, row in enumerate(rows)]\n"
                "    last = len(rows) - 1"
            },
        ),
        WrongAnswer(
            "all are stuck or none is",
            fails="value",
            says="some finish, some don't: the result",
            edits={
                "return [r for r, row in enumerate(rows) if at[r] < len(row)]": (
                    "return [] if all(at[r] == len(row) for r, row in enumerate(rows)) else list(range(len(rows)))"
                )
            },
        ),
        WrongAnswer(
            "takes the rows apart",
            fails="untouched",
            says="`rows`",
            edits={"done.add(row[at[r]])\n                at[r] += 1": "done.add(row.pop(0))"},
        ),
    ),
    "forwards_ahead": (
        WrongAnswer("beside those of 1F1B", fails="value", says="no time: 1, 2", edits={"1 + ceil": "ceil"}),
        WrongAnswer(
            "one hop",
            fails="value",
            says="a little longer than that: 1, 2 and 1.625 s: the result is 2, should be 3",
            edits={"2 * hop": "hop"},
        ),
        WrongAnswer("rounded down", fails="value", says="the result is 2, should be 3", edits={"ceil(": "int("}),
        WrongAnswer(
            "in forwards", fails="value", says="is 4, should be 2", edits={"/ (forward + backward)": "/ forward"}
        ),
        WrongAnswer(
            "not rounded",
            fails="value",
            says="is 1.0 (float), should be 1 (int)",
            edits={"ceil(2 * hop / (forward + backward))": "2 * hop / (forward + backward)"},
        ),
    ),
}
