"""Wrong answers to the exercises of lesson 08."""

from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "average_when_ready": (
        WrongAnswer(
            "takes its argument for the gradient: it is the parameter",
            fails="value",
            says="Rank 0, step 0: the gradient of parameter 0 is wrong in",
            edits={
                "parameter.grad /= dist": "parameter /= dist",
                "works.append(dist.all_reduce(parameter.grad,": "works.append(dist.all_reduce(parameter,",
            },
            also=("agreement",),
        ),
        WrongAnswer(
            "waits inside the hook",
            fails="overlap",
            says="Rank 0, step 0: when backward returned, 4 of 4 messages had been waited for, should be 0.",
            edits={
                "works.append(dist.all_reduce(parameter.grad, async_op=True))": "dist.all_reduce(parameter.grad)",
            },
        ),
        WrongAnswer(
            "asks in a loop inside the hook whether the message has ended",
            fails="overlap",
            says="Rank 0, step 0: asks is_completed() before backward has returned",
            edits={
                "works.append(dist.all_reduce(parameter.grad, async_op=True))": (
                    "works.append(dist.all_reduce(parameter.grad, async_op=True))\n"
                    "        while not works[-1].is_completed():\n            pass"
                ),
            },
        ),
        WrongAnswer(
            "keeps every handle for ever",
            fails="memory",
            says="Rank 0, step 1: 4 handles of the step before are still kept: let go of them in finish().",
            edits={"        works.clear()\n": ""},
        ),
        WrongAnswer(
            "waits for the message before",
            fails="overlap",
            says="Rank 0, step 0: when backward returned, 3 of 4 messages had been waited for, should be 0.",
            edits={
                "        works.append(": (
                    "        for before in works[-1:]:\n            before.wait()\n        works.append("
                ),
            },
        ),
        WrongAnswer(
            "starts everything in finish",
            fails="overlap",
            says="Rank 0, step 0: when backward returned, 0 of 4 messages were started.",
            body="""
def finish():
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
""",
        ),
        WrongAnswer(
            "does not divide",
            fails="value",
            says="Rank 0, step 0: the gradient of parameter 0 is wrong in",
            edits={
                "        parameter.grad /= dist.get_world_size()  "
                "# before the sum, which could be too large for half precision\n": ""
            },
        ),
        WrongAnswer(
            "nobody waits",
            fails="value",
            says="Rank 0, step 0: finish() returned while 4 messages were under way.",
            edits={"work.wait()": "pass"},
            also=("waits",),
        ),
        WrongAnswer(
            "a hook on frozen parameters too",
            fails="runs",
            says="called with a model: Ranks 0, 1, 2 and 3 raised RuntimeError",
            edits={
                "        if parameter.requires_grad:\n            parameter.register": "        parameter.register",
            },
        ),
        WrongAnswer(
            "gives frozen parameters gradients of zeros",
            fails="untouched",
            says="the gradient of '1.weight' is changed",
            edits={
                "        for work in works:": "        for parameter in model.parameters():\n"
                "            if parameter.grad is None:\n                parameter.grad = torch.zeros_like(parameter)\n"
                "        for work in works:"
            },
        ),
    ),
    "exposed_time": (
        WrongAnswer(
            "all communication less all computing",
            fails="value",
            says="Rank 0, a message after backward: the result is 0.0, should be 3.0.",
            body="""
computing = sum(end - start for start, end in compute)
return max(0.0, sum(end - start for start, end in communication) - computing)
""",
        ),
        WrongAnswer(
            "what comes after the last computing",
            fails="value",
            says="Rank 0, a gap in computing: the result is 0.0, should be 3.0.",
            body="""
last = max((end for _, end in compute), default=0.0)
return float(sum(max(0.0, end - max(start, last)) for start, end in communication))
""",
        ),
        WrongAnswer(
            "messages that overlap count twice",
            fails="value",
            says="Rank 0, two messages at once: the result is 4.0, should be 3.0.",
            edits={
                "on_the_wire = any(": "on_the_wire = sum(",
                "if on_the_wire and not computing:\n            exposed += end - start": (
                    "if not computing:\n            exposed += on_the_wire * (end - start)"
                ),
            },
        ),
        WrongAnswer(
            "takes off computing message by message, twice where it overlaps",
            fails="value",
            says="Rank 0, computing in two threads: the result is 0.0, should be 1.0.",
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
            fails="value",
            says="Rank 0, a tail: the result is 0.0, should be 0.5.",
            body="""
def beside(start, end):
    return any(a < end and start < b for a, b in compute)

return float(sum(end - start for start, end in communication if not beside(start, end)))
""",
        ),
        WrongAnswer(
            "sorts the caller's list",
            fails="untouched",
            says="Rank 0, a gap in computing: compute has other entries than before",
            edits={"    moments = sorted(": "    compute.sort()\n    moments = sorted("},
        ),
        WrongAnswer(
            "rounds to hundredths of a second",
            fails="value",
            says="in units of 1/1024 s",
            edits={"    return exposed": "    return round(exposed, 2)"},
        ),
    ),
}
