"""Wrong answers to the exercises of lesson 08."""

from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "average_when_ready": (
        WrongAnswer(
            "finish() keeps an error of a message to itself",
            fails="runs",
            says="and a connection broke: rank 0 returned, though all_reduce raised an error",
            edits={
                "            work.wait()\n": "            try:\n                work.wait()\n"
                "            except Exception:\n                pass\n"
            },
        ),
        WrongAnswer(
            "no hook where there is a gradient already",
            fails="overlap",
            says="Rank 0, step 0: when backward returned, 5 of 6 messages were started.",
            edits={"if parameter.requires_grad:": "if parameter.requires_grad and parameter.grad is None:"},
            also=("value", "agreement"),
        ),
        WrongAnswer(
            "copies rank 0's weights first, as torch's class does",
            fails="cost",
            says="called with a model: calls broadcast",
            edits={
                "    def hook(": "    [dist.broadcast(each.data, 0) for each in model.parameters()]\n\n    def hook("
            },
        ),
        WrongAnswer(
            "takes its argument for the gradient: it is the parameter",
            fails="value",
            says="Rank 0, step 0: the gradient of",
            edits={
                "parameter.grad /= dist": "parameter /= dist",
                "works.append(dist.all_reduce(parameter.grad,": "works.append(dist.all_reduce(parameter,",
            },
            also=("agreement",),
        ),
        WrongAnswer(
            "waits inside the hook",
            fails="overlap",
            says="Rank 0, step 0: when backward returned, 6 of 6 messages had been waited for, should be 0.",
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
            says="Rank 0, step 0: 6 handles are still kept: let go of them in finish().",
            edits={"        works.clear()\n": ""},
        ),
        WrongAnswer(
            "waits for the message before",
            fails="overlap",
            says="of 6 messages had been waited for, should be 0.",
            edits={
                "        works.append(": (
                    "        for before in works[-1:]:\n            before.wait()\n        works.append("
                ),
            },
        ),
        WrongAnswer(
            "starts everything in finish",
            fails="overlap",
            says="Rank 0, step 0: when backward returned, 0 of 6 messages were started.",
            body="""
def finish():
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is not None:
            parameter.grad /= dist.get_world_size()
            dist.all_reduce(parameter.grad)
""",
            also=("cost",),
        ),
        WrongAnswer(
            "does not divide",
            fails="value",
            says="Rank 0, step 0: the gradient of",
            edits={
                "        parameter.grad /= dist.get_world_size()  "
                "# before the sum, which could be too large for half precision\n": ""
            },
        ),
        WrongAnswer(
            "nobody waits",
            fails="value",
            says="Rank 0, step 0: finish() returned while 6 messages were under way.",
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
            "hooks for frozen parameters, too",
            fails="untouched",
            says="the answer leaves 2 hooks on the frozen parameters.",
            edits={
                "        if parameter.requires_grad:\n            parameter.register_post_accumulate_grad_hook(hook)": (
                    "        trained = parameter.requires_grad\n"
                    "        parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)\n"
                    "        parameter.requires_grad_(trained)"
                )
            },
        ),
        WrongAnswer(
            "gives frozen parameters gradients of zeros",
            fails="untouched",
            says="the gradient of 'sometimes.bias' is changed",
            edits={
                "        for work in works:": "        for parameter in model.parameters():\n"
                "            if not parameter.requires_grad and parameter.grad is None:\n"
                "                parameter.grad = torch.zeros_like(parameter)\n"
                "        for work in works:"
            },
        ),
        WrongAnswer(
            "a hook that runs before the gradient is in .grad",
            fails="value",
            says="an all-reduce was started before `.grad` was complete: there is another hook for that.",
            body="""
def hook(gradient):
    gradient /= dist.get_world_size()
    works.append(dist.all_reduce(gradient, async_op=True))

for parameter in model.parameters():
    if parameter.requires_grad:
        parameter.register_hook(hook)

def finish():
    for work in works:
        work.wait()
    works.clear()
""",
            also=("agreement",),
        ),
        WrongAnswer(
            "clears the gradient of a parameter that no rank used in this step",
            fails="value",
            says="the gradient of 'sometimes.weight', which no rank used in this step, is None, should be a Tensor.",
            edits={
                "    def hook": "    arrived = set()\n\n    def hook",
                "        works.append(": "        arrived.add(parameter)\n        works.append(",
                "        works.clear()\n": "        works.clear()\n        for parameter in model.parameters():\n"
                "            if parameter.requires_grad and parameter not in arrived:\n"
                "                parameter.grad = None\n        arrived.clear()\n",
            },
        ),
        WrongAnswer(
            "sends a copy of a gradient that is not contiguous",
            fails="value",
            says="the gradient of 'first.weight' is wrong in",
            edits={"dist.all_reduce(parameter.grad,": "dist.all_reduce(parameter.grad.reshape(-1),"},
            also=("agreement",),
        ),
        WrongAnswer(
            "hides NaN",
            fails="value",
            says="the gradient of 'first.bias' is",
            edits={
                "        parameter.grad /= dist": "        parameter.grad.nan_to_num_()\n        parameter.grad /= dist"
            },
        ),
        WrongAnswer(
            "keeps the last handle",
            fails="memory",
            says="1 handle is still kept: let go of it in finish()",
            edits={"works.clear()": "works[:] = works[-1:]"},
        ),
        WrongAnswer(
            "keeps the gradients",
            fails="memory",
            says="are still kept after finish(), beside `.grad`",
            edits={
                "        works.append(": "        kept[parameter] = parameter.grad.detach()\n        works.append(",
                "    def hook": "    kept = {}\n\n    def hook",
            },
        ),
        WrongAnswer(
            "keeps what the gradients were in lists",
            fails="memory",
            says="elements out of torch by .tolist()",
            edits={
                "        works.append(": "        kept[parameter] = parameter.grad.tolist()\n        works.append(",
                "    def hook": "    kept = {}\n\n    def hook",
            },
        ),
        WrongAnswer(
            "gives zeros to a parameter that no step uses",
            fails="value",
            says="the gradient of 'never', which no rank used in this step, is a Tensor, should be None.",
            edits={
                "        works.clear()\n": "        works.clear()\n        for parameter in model.parameters():\n"
                "            if parameter.requires_grad and parameter.grad is None:\n"
                "                parameter.grad = torch.zeros_like(parameter)\n"
            },
        ),
        WrongAnswer(
            "divides the sum, which may be too large",
            fails="value",
            says="the gradient of 'deep.0.0.bias' is [inf, inf], should be",
            edits={
                "        parameter.grad /= dist.get_world_size()  "
                "# before the sum, which could be too large for half precision\n": "",
                "works.append(dist.all_reduce(parameter.grad, async_op=True))": (
                    "works.append((dist.all_reduce(parameter.grad, async_op=True), parameter))"
                ),
                "for work in works:\n            work.wait()": (
                    "for work, parameter in works:\n            work.wait()\n"
                    "            parameter.grad /= dist.get_world_size()"
                ),
            },
        ),
        WrongAnswer(
            "sends float64",
            fails="cost",
            says="147,588 bytes from one rank, budget 73,797. Each gradient is sent once, in its own dtype.",
            edits={
                "works.append(dist.all_reduce(parameter.grad, async_op=True))": (
                    "sent = parameter.grad.double()\n"
                    "        works.append((dist.all_reduce(sent, async_op=True), sent, parameter))"
                ),
                "for work in works:\n            work.wait()": (
                    "for work, sent, parameter in works:\n            work.wait()\n"
                    "            parameter.grad.copy_(sent)"
                ),
            },
        ),
        WrongAnswer(
            "one handle for each shape",
            fails="value",
            says="Rank 0, step 0: finish() returned while 1 message was under way.",
            edits={
                "works.append(dist.all_reduce(parameter.grad, async_op=True))": (
                    "works.append(dist.all_reduce(parameter.grad, async_op=True))\n"
                    "        handles[tuple(parameter.shape)] = works.pop()"
                ),
                "    def hook": "    handles = {}\n\n    def hook",
                "for work in works:": "for work in handles.values():",
                "works.clear()": "handles.clear()",
            },
            also=("waits",),
        ),
        WrongAnswer(
            "asks the future whether the message has ended",
            fails="overlap",
            says="Rank 0, step 0: asks done() before backward has returned",
            edits={
                "works.append(dist.all_reduce(parameter.grad, async_op=True))": (
                    "works.append(dist.all_reduce(parameter.grad, async_op=True))\n"
                    "        works[-1].get_future().done()"
                ),
            },
        ),
        WrongAnswer(
            "only in training mode",
            fails="value",
            says="step 1, without sometimes.weight: the gradient of",
            edits={
                "        parameter.grad /= dist": (
                    "        if not model.training:\n            return\n        parameter.grad /= dist"
                )
            },
            also=("overlap", "agreement"),
        ),
        WrongAnswer(
            "leaves a hook on the model",
            fails="untouched",
            says="leaves 1 hook on the modules",
            edits={"    def finish": "    model.register_forward_hook(lambda *_: None)\n\n    def finish"},
        ),
        WrongAnswer(
            "sends a large gradient in pieces",
            fails="cost",
            says="if there were 2 ranks, 34 parameters, seed 1: calls all_reduce 38 times, budget 34.",
            edits={
                "works.append(dist.all_reduce(parameter.grad, async_op=True))": (
                    "large = parameter.numel() > 2**16\n"
                    "        for part in parameter.grad.split(2**16) if large else [parameter.grad]:\n"
                    "            works.append(dist.all_reduce(part, async_op=True))"
                ),
            },
        ),
    ),
    "exposed_time": (
        WrongAnswer(
            "nothing begins before a moment that seems early enough",
            fails="value",
            says="in units of 1024 s, from -5.76461e+17 s on, drawn with seed 1: the result is 0.0, should be ",
            edits={"for moment in stretch}": "for moment in stretch if moment > -1e12}"},
        ),
        WrongAnswer(
            "asks in the middle of each piece: the shortest have none",
            fails="value",
            says="a message as short as floats can tell, 0 of them after 2³⁰ s: the result is 0.0, should be",
            edits={
                "any(a <= start and end <= b for a, b in communication)": (
                    "any(a < (start + end) / 2 < b for a, b in communication)"
                ),
            },
        ),
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
            says="Rank 0: compute (a gap in computing) has other entries than before",
            edits={"    moments = sorted(": "    compute.sort()\n    moments = sorted("},
        ),
        WrongAnswer(
            "forgets the hundredth message",
            fails="value",
            says="100 messages, drawn with seed",
            edits={"    moments =": "    communication = communication[:99]\n    moments ="},
        ),
        WrongAnswer(
            "rounds to hundredths of a second",
            fails="value",
            says="a short tail: the result is 0.0, should be 9.5367431640625e-07.",
            edits={"    return exposed": "    return round(exposed, 2)"},
        ),
        WrongAnswer(
            "joins stretches and forgets that one may lie inside another",
            fails="value",
            says="a message inside another: the result is",
            body="""
def joined(stretches):
    found = []
    for start, end in sorted(stretches):
        if found and start <= found[-1][1]:
            found[-1][1] = end
        else:
            found.append([start, end])
    return found

compute, communication = joined(compute), joined(communication)
hidden = sum(max(0.0, min(b, d) - max(a, c)) for a, b in compute for c, d in communication)
return float(sum(end - start for start, end in communication) - hidden)
""",
        ),
        WrongAnswer(
            "begins at 0",
            fails="value",
            says="stretches that end at 0 or begin there: the result is",
            edits={"exposed = 0.0": "exposed = 0.0\n    moments = [moment for moment in moments if moment >= 0]"},
        ),
        WrongAnswer(
            "leaves out what takes less than a femtosecond",
            fails="value",
            says="in units of 8.67362e-19 s",
            edits={"if on_the_wire and": "if end - start > 1e-15 and on_the_wire and"},
        ),
        WrongAnswer(
            "calls the package's own",
            fails="own",
            says="The answer calls the package's exposed_seconds: write it yourself.",
            body="""
from scratch_ddp.instruments.intervals import exposed_seconds

return exposed_seconds(compute, communication)
""",
        ),
    ),
}
