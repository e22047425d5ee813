"""Wrong answers to the exercises of lesson 11b."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "checkpointed": (
        WrongAnswer("nothing is recomputed", "memory", "one block: the number of elements", body="return function(x)"),
        WrongAnswer(
            "another mask: the second call draws new numbers",
            "value",
            "two blocks with dropout: the gradient of x",
            {"                torch.set_rng_state(ctx.random)\n": ""},
        ),
        WrongAnswer(
            "the generator stays where the second call has left it",
            "next",
            "the number drawn afterwards",
            {"with torch.random.fork_rng(devices=[]), torch.enable_grad()": "with torch.enable_grad()"},
        ),
        WrongAnswer(
            "the recomputed output is linked to the first graph's input",
            "runs",
            "element 0 of tensors does not require grad",
            {"fork_rng(devices=[]), torch.enable_grad()": "fork_rng(devices=[])"},
        ),
        WrongAnswer(
            "backward starts with ones",
            "value",
            "one block: the gradient of x",
            {"function(again).backward(gradient)": "function(again).sum().backward()"},
        ),
        WrongAnswer(
            "the parameters are forgotten",
            "value",
            "one block: block 0: the gradient of 0.weight is None",
            {
                "function(again).backward(gradient)": "(own,) = torch.autograd.grad(function(again), again, gradient)",
                "return again.grad": "return own",
            },
        ),
        WrongAnswer(
            "the output is kept, too",
            "memory",
            "one block: the number of elements",
            {
                "ctx.save_for_backward(x)\n": "y = function(x)\n            ctx.save_for_backward(x, y)\n",
                "return function(x)": "return y",
                "(x,) = ctx": "x, _ = ctx",
            },
        ),
    ),
    "choose_blocks": (
        WrongAnswer(
            "the largest first",
            "time",
            "the block that frees most a second",
            body="""
            chosen, kept = [], sum(saved)
            for i in sorted(range(len(saved)), key=lambda i: -saved[i]):
                if kept > budget:
                    chosen.append(i)
                    kept -= saved[i]
            return chosen
            """,
        ),
        WrongAnswer(
            "what frees most bytes for a second first",
            "time",
            "should be",
            body="""
            chosen, kept = [], sum(saved)
            for i in sorted(range(len(saved)), key=lambda i: -saved[i] / seconds[i]):
                if kept > budget:
                    chosen.append(i)
                    kept -= saved[i]
            return chosen
            """,
        ),
        WrongAnswer("all of them", "time", "equal blocks: the time", body="return list(range(len(saved)))"),
        WrongAnswer(
            "the budget may not be used up",
            "time",
            "everything fits, exactly",
            {"kept <= budget": "(kept < budget or not kept)"},
        ),
        WrongAnswer(
            "those to keep",
            "valid",
            "equal blocks: the other blocks keep",
            {"fewest[1]": "[i for i in blocks if i not in fewest[1]]"},
        ),
    ),
}
