"""Other right answers to the exercises of lesson 11."""

RIGHT_ANSWERS = {
    "reduce_to_owners": [
        # all under way at once, waited for at the end
        """
        works = [dist.reduce(p.grad.div_(n), dst=i % n, async_op=True) for i, p in enumerate(params)]
        for i, (p, work) in enumerate(zip(params, works)):
            work.wait()
            if i % n != rank:
                del p.grad
        """,
    ],
    "bytes_held": [
        # a table of what is whole
        """
        whole = {0: 4, 1: 2, 2: 1, 3: 0}[stage]
        return 4 * (whole * parameters + (4 - whole) * (parameters // n))
        """,
    ],
}
