"""Other right answers to the exercises of lesson 12."""

RIGHT_ANSWERS = {
    "split_step": [
        # cuts what computes out of the step, then what is under way, then what waits
        """
        def cut(pieces, holes):
            for low, high in holes:
                pieces = [(a, b) for x, y in pieces for a, b in ((x, min(y, low)), (max(x, high), y)) if a < b]
            return pieces

        def seconds(pieces):
            return sum((b - a for a, b in pieces), 0.0)

        left, parts = [step], []
        ready = [max(each[k][0] for each in calls) for k in range(len(calls[rank]))]
        under_way = [(since, ended) for since, (_, ended) in zip(ready, calls[rank], strict=True)]
        for intervals in (computing, under_way, calls[rank]):
            parts.append(seconds(left) - seconds(cut(left, intervals)))
            left = cut(left, intervals)
        computed, transfer, waiting = parts
        return [computed, waiting, transfer, seconds(left)]
        """,
    ],
}
