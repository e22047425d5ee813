"""Wrong answers to the exercises of lesson 08."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "average_when_ready": (
        WrongAnswer(
            "takes its argument for the gradient: it is the parameter",
            "value",
            "two steps: step 0: the gradient of 'first.weight'",
            {
                "parameter.grad /= dist": "parameter /= dist",
                "works.append(dist.all_reduce(parameter.grad,": "works.append(dist.all_reduce(parameter,",
            },
        ),
        WrongAnswer(
            "waits inside the hook",
            "overlap",
            "step 0: the number of messages waited for when backward returned is 6, should be 0",
            {"works.append(dist.all_reduce(parameter.grad, async_op=True))": "dist.all_reduce(parameter.grad)"},
        ),
        WrongAnswer(
            "starts everything in finish",
            "overlap",
            "step 0: the number of messages started before the first layer's backward is 0, should be",
            body="""
            def finish():
                for parameter in model.parameters():
                    if parameter.requires_grad and parameter.grad is not None:
                        parameter.grad /= dist.get_world_size()
                        dist.all_reduce(parameter.grad)
            """,
        ),
        WrongAnswer(
            "does not divide",
            "value",
            "two steps: step 0: the gradient of 'first.weight'",
            {"parameter.grad /= dist.get_world_size()": "pass"},
        ),
        WrongAnswer(
            "nobody waits",
            "waits",
            "two steps: all_reduce was started and never waited for, 10 times",
            {"work.wait()": "pass"},
        ),
        WrongAnswer(
            "keeps every handle for ever",
            "memory",
            "two steps: step 0: the number of handles kept after finish() is 6, should be 0",
            {"        works.clear()\n": ""},
        ),
        WrongAnswer(
            "a hook on frozen parameters too",
            "runs",
            "Rank 0 raised RuntimeError: cannot register a hook on a tensor that doesn't require",
            {"        if parameter.requires_grad:\n            parameter.register": "        parameter.register"},
        ),
    ),
    "exposed_time": (
        WrongAnswer(
            "whenever nothing is computed",
            "value",
            "a pause before the message: the result is 2.0, should be 1.0",
            {"if on_the_wire and not computing:": "if not computing:"},
        ),
        WrongAnswer(
            "all communication less all computing",
            "value",
            "a message after backward: the result is 0.0, should be 3.0",
            body="""
            computing = sum(end - start for start, end in compute)
            return max(0.0, sum(end - start for start, end in communication) - computing)
            """,
        ),
        WrongAnswer(
            "messages that overlap count twice",
            "value",
            "two messages at once: the result is 4.0, should be 3.0",
            {
                "on_the_wire = any(": "on_the_wire = sum(",
                "if on_the_wire and not computing:\n            exposed += end - start": (
                    "if not computing:\n            exposed += on_the_wire * (end - start)"
                ),
            },
        ),
        WrongAnswer(
            "takes off computing message by message, twice where it overlaps",
            "value",
            "two messages at once: the result is 4.0, should be 3.0",
            body="""
            exposed = 0.0
            for start, end in communication:
                hidden = sum(max(0.0, min(end, b) - max(start, a)) for a, b in compute)
                exposed += end - start - hidden
            return exposed
            """,
        ),
        WrongAnswer(
            "only messages that are exposed from beginning to end",
            "value",
            "a tail: the result is 0.0, should be 0.5",
            body="""
            def beside(start, end):
                return any(a < end and start < b for a, b in compute)

            return float(sum(end - start for start, end in communication if not beside(start, end)))
            """,
        ),
    ),
}
