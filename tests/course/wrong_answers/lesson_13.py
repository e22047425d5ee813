"""Wrong answers to the exercises of lesson 13."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "one_f_one_b": (
        WrongAnswer(
            "GPipe",
            "memory",
            "p = 4, m = 8: the most activations that rank 0 holds is 8, should be 4",
            body="""
                for r, row in enumerate(rows):
                    row += [Action(kind, r, i) for kind in "FB" for i in range(m)]
            """,
        ),
        WrongAnswer("none ahead", "time", "its length in units is 96.0, should be 33.0", {"min(p - 1 - r, m)": "0"}),
        WrongAnswer(
            "as many ahead on every rank",
            "memory",
            "the most activations that rank 1 holds is 4, should be 3",
            {"min(p - 1 - r, m)": "min(p - 1, m)"},
        ),
        WrongAnswer(
            "the first ranks have the fewest ahead",
            "value",
            "the schedule deadlocks: rank 0, at B0 of stage 0, waits for",
            {"min(p - 1 - r, m)": "min(r, m)"},
        ),
        WrongAnswer(
            "m < p is not thought of",
            "value",
            "p = 4, m = 2: F2 of stage 0 does not belong into a schedule of 2 micro-batches",
            {"min(p - 1 - r, m)": "p - 1 - r"},
        ),
        WrongAnswer(
            "the forwards run out, and the last backwards with them",
            "value",
            "B5 of stage 0 is missing",
            {'            row.append(Action("B", r, i))': '                row.append(Action("B", r, i))'},
        ),
    ),
    "zero_bubble": (
        WrongAnswer(
            "each W at once",
            "time",
            "p = 4, m = 8: its length in units is 30.0, should be 27.0",
            {"i >= r": "i >= 0", 'Action("W", stage, i - r)': 'Action("W", stage, i)', "range(m - r, m)": "()"},
        ),
        WrongAnswer(
            "every W at the end",
            "memory",
            "p = 4, m = 8: the most activations that rank 0 holds is 8, should be 4",
            {"i >= r": "False", "range(m - r, m)": "range(m)"},
        ),
        WrongAnswer("the last Ws are lost", "value", "W7 of stage 1 is missing", {"range(m - r, m)": "()"}),
        WrongAnswer(
            "W before its I",
            "value",
            "the schedule deadlocks: rank 0, at W0 of stage 0, waits for the gradient of stage 0",
            body="""
                rows = schedules.one_f_one_b(p, m)
                for r, row in enumerate(rows):
                    each = {"F": "F", "B": "WI"}
                    rows[r] = [Action(new, r, i) for kind, _, i in row for new in each[kind]]
                return rows
            """,
        ),
    ),
    "who_is_stuck": (
        WrongAnswer(
            "one pass",
            "value",
            "GPipe, 4 ranks",
            {"                progress = True": "                progress = False"},
        ),
        WrongAnswer(
            "the next stage's B is forgotten",
            "value",
            "each waits for the other: the result is [], should be [0, 1]",
            {' | ({Action("B", stage + 1, i)} if stage < last else set())': ""},
        ),
        WrongAnswer(
            "its own F is forgotten", "value", "a backward before its own forward", {'{Action("F", stage, i)} |': ""}
        ),
        WrongAnswer(
            "ranks for stages",
            "value",
            "some finish, some don't",
            {"if stage < last else": "if stage < len(rows) - 1 else"},
        ),
        WrongAnswer(
            "all are stuck or none is",
            "value",
            "some finish, some don't",
            {"if at[r] < len(row)]": "if sum(at) < sum(map(len, rows))]"},
        ),
        WrongAnswer(
            "takes the rows apart",
            "untouched",
            "`rows`",
            {"done.add(row[at[r]])\n                at[r] += 1": "done.add(row.pop(0))"},
        ),
    ),
    "forwards_ahead": (
        WrongAnswer("no + 1", "value", "no time: 1, 2 and 0 s: the result is 0, should be 1", {"1 + ceil": "ceil"}),
        WrongAnswer("one hop", "value", "1, 2 and 1.625 s: the result is 2, should be 3", {"2 * hop": "hop"}),
        WrongAnswer("rounded down", "value", "1, 2 and 1.625 s: the result is 2, should be 3", {"ceil(": "int("}),
        WrongAnswer("in forwards", "value", "is 4, should be 2", {"/ (forward + backward)": "/ forward"}),
    ),
}
