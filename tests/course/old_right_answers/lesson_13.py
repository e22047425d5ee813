"""Unusual right answers of lesson 13: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
    "one_f_one_b": [
        {'row.append(Action("F", r, ahead + i))': 'row.append(("F", r, ahead + i))', "row += [": "row[:] = ["},
    ],
    "zero_bubble": [
        """
        rows = []
        for r in range(p):
            left = {kind: list(range(m)) for kind in "FIW"}
            row = [Action("F", r, left["F"].pop(0)) for _ in range(min(p - 1 - r, m))]
            while left["W"]:
                for kind in "FI":
                    if left[kind]:
                        row.append(Action(kind, r, left[kind].pop(0)))
                if m - len(left["I"]) > r or not left["I"]:
                    row.append(Action("W", r, left["W"].pop(0)))
            rows.append(row)
        return rows
        """,
    ],
    "who_is_stuck": [
        """
        done, waiting = set(), {r: list(row) for r, row in enumerate(rows)}
        for _ in range(sum(map(len, rows))):
            for r in [r for r in waiting if waiting[r]]:
                kind, stage, i = waiting[r][0]
                needs = [("F", stage - 1, i)] if kind == "F" else [("F", stage, i), ("B", stage + 1, i)]
                if all(each in done or not 0 <= each[1] <= last for each in needs):
                    done.add((kind, stage, i))
                    del waiting[r][0]
        return sorted(r for r in waiting if waiting[r])
        """,
    ],
    "forwards_ahead": [
        {"1 + ceil(2 * hop": "ceil((forward + backward + 2 * hop)"},
    ],
}
