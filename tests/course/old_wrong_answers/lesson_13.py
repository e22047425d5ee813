"""Wrong answers to the exercises of lesson 13."""

from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "one_f_one_b": (
        WrongAnswer(
            "GPipe",
            fails="memory",
            says="row 0 holds 8 activations, budget 4",
            body="""
                for r, row in enumerate(rows):
                    row += [Action(kind, r, i) for kind in "FB" for i in range(m)]
            """,
        ),
        WrongAnswer(
            "one forward too many ahead",
            fails="memory",
            says="row 0 holds 5 activations, budget 4",
            edits={"min(p - 1 - r, m)": "min(p - r, m)"},
        ),
        WrongAnswer(
            "no forwards ahead",
            fails="time",
            says="takes 96 units, budget 33",
            edits={"min(p - 1 - r, m)": "0"},
        ),
        WrongAnswer(
            "as many ahead on every rank",
            fails="memory",
            says="row 1 holds 4 activations, budget 3",
            edits={"min(p - 1 - r, m)": "min(p - 1, m)"},
            also=("time",),
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
        WrongAnswer(
            "the stage of the micro-batch, the micro-batch of the stage",
            fails="value",
            says="row 0 has an action of stage 1, should have stage 0 alone",
            edits={'row.append(Action("B", r, i))': 'row.append(Action("B", i, r))'},
        ),
        WrongAnswer(
            "tuples without a kind",
            fails="value",
            says="row 0 should hold Action(kind, stage, micro-batch) alone",
            edits={'row.append(Action("B", r, i))': 'row.append(("B", i))'},
        ),
    ),
    "zero_bubble": (
        WrongAnswer(
            "1F1B as it is",
            fails="value",
            says="row 0 should have the kinds F, I, W alone",
            body="return schedules.one_f_one_b(p, m)",
        ),
        WrongAnswer(
            "each W at once",
            fails="time",
            says="takes 30 units, budget 27",
            edits={"i >= r": "i >= 0", 'Action("W", stage, i - r)': 'Action("W", stage, i)', "range(m - r, m)": "()"},
        ),
        WrongAnswer(
            "every W at the end",
            fails="memory",
            says="row 0 holds 8 activations, budget 4",
            edits={"i >= r": "False", "range(m - r, m)": "range(m)"},
            also=("time",),
        ),
        WrongAnswer(
            "each W one micro-batch later, whatever the rank",
            fails="time",
            says="units, budget 27",
            edits={"i >= r": "i >= 1", "stage, i - r)": "stage, i - 1)", "range(m - r, m)": "range(m - 1, m)"},
            also=("memory",),
        ),
        WrongAnswer(
            "one micro-batch later than that",
            fails="memory",
            says="row 0 holds 5 activations, budget 4",
            also=("time",),
            edits={
                "i >= r": "i >= r + 1",
                "stage, i - r)": "stage, i - r - 1)",
                "range(m - r, m)": "range(m - r - 1, m)",
            },
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
            "GPipe with its backward in two",
            fails="memory",
            says="row 0 holds 8 activations, budget 4",
            also=("time",),
            body="""
                return [[Action(kind, r, i) for kind in "FIW" for i in range(m)] for r in range(p)]
            """,
        ),
        WrongAnswer(
            "only the last rank cuts its backward",
            fails="value",
            says="row 0 should have the kinds F, I, W alone",
            edits={'"I" if kind == "B" else kind': '"I" if kind == "B" and r == p - 1 else kind'},
        ),
    ),
    "who_is_stuck": (
        WrongAnswer(
            "one round only",
            fails="value",
            says="should be []",
            edits={"                progress = True": "                progress = False"},
        ),
        WrongAnswer(
            "looks at each action once, and at no backward",
            fails="value",
            says="should be [",
            body="""
                done = set()
                for r, row in enumerate(rows):
                    for kind, stage, i in row:
                        before = Action("F", stage - 1, i) if kind == "F" and stage else Action("F", stage, i)
                        if kind == "F" and not stage or before in done:
                            done.add(Action(kind, stage, i))
                return [r for r, row in enumerate(rows) if not set(row) <= done]
            """,
        ),
        WrongAnswer(
            "backward without the next stage's",
            fails="value",
            says="is [], should be",
            edits={' | ({Action("B", stage + 1, i)} if stage < last else set())': ""},
        ),
        WrongAnswer(
            "backward without its own forward",
            fails="value",
            says="GPipe, all rows reversed",
            edits={
                'return {Action("F", stage, i)} | ({Action("B", stage + 1, i)} if stage < last else set())': (
                    'return {Action("B", stage + 1, i)} if stage < last else set()'
                )
            },
        ),
        WrongAnswer(
            "the stage's number for the rank's",
            fails="value",
            says="a rank with nothing to do",
            edits={"if stage < last else": "if stage < len(rows) - 1 else"},
        ),
        WrongAnswer(
            "all are stuck or none is",
            fails="value",
            says="should be",
            edits={
                "return [r for r, row in enumerate(rows) if at[r] < len(row)]": (
                    "return [] if all(at[r] == len(row) for r, row in enumerate(rows)) else list(range(len(rows)))"
                )
            },
        ),
        WrongAnswer(
            "one finished forward is enough for all backwards",
            fails="value",
            says="a backward before its forward: the result is [], should be [0, 1]",
            edits={
                'return {Action("F", stage, i)} |': 'return ({Action("F", stage, i)} - {Action("F", last, 1)}) |',
            },
        ),
        WrongAnswer(
            "a hundred rounds are enough",
            fails="value",
            says="240 micro-batches: the result is [0, 1], should be []",
            edits={
                "    while progress:\n        progress = False": "    for _ in range(100):\n        progress = False"
            },
        ),
        WrongAnswer(
            "who is not",
            fails="value",
            says="is [0, 1, 2, 3], should be []",
            edits={"if at[r] < len(row)]": "if at[r] == len(row)]"},
        ),
        WrongAnswer(
            "a rank skips what it can't do",
            fails="value",
            says="is [], should be",
            body="""
                return []
            """,
        ),
        WrongAnswer(
            "takes the rows apart",
            fails="untouched",
            says="has other entries than before",
            edits={"done.add(row[at[r]])\n                at[r] += 1": "done.add(row.pop(0))"},
        ),
        WrongAnswer(
            "waits for ever",
            fails="runs",
            says="did not come back",
            edits={"        progress = False": "        pass"},
        ),
    ),
    "forwards_ahead": (
        WrongAnswer("as on a fast wire", fails="value", says="is 1, should be 2", body="return 1"),
        WrongAnswer(
            "the output's hop alone",
            fails="value",
            says="is 2, should be 3",
            edits={"2 * hop": "hop"},
        ),
        WrongAnswer("rounded down", fails="value", says="is 1, should be 2", edits={"ceil(": "int("}),
        WrongAnswer("always one more", fails="value", says="is 2, should be 1", edits={"1 + ceil(2": "2 + int(2"}),
        WrongAnswer(
            "in forwards", fails="value", says="is 4, should be 2", edits={"/ (forward + backward)": "/ forward"}
        ),
        WrongAnswer(
            "in backwards", fails="value", says="is 3, should be 2", edits={"/ (forward + backward)": "/ backward"}
        ),
        WrongAnswer("beside those of 1F1B", fails="value", says="is 0, should be 1", edits={"1 + ceil": "ceil"}),
        WrongAnswer(
            "not rounded",
            fails="value",
            says="is a float, should be an int",
            edits={"ceil(2 * hop / (forward + backward))": "2 * hop / (forward + backward)"},
        ),
    ),
}
