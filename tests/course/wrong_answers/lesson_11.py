"""Wrong answers to the exercises of lesson 11."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "sharded_optimizer": (
        WrongAnswer(
            "an optimizer for all parameters: right, and nothing saved",
            "memory",
            "three steps of Adam: step 0: the number of parameters that have state is",
            {"params[rank::n]": "params"},
        ),
        WrongAnswer(
            "clears the gradients of its own share only",
            "value",
            "step 0: the list of parameters that have a gradient after zero_grad() is",
            {"for parameter in params:\n            parameter.grad = None": "own.zero_grad()"},
        ),
        WrongAnswer(
            "nobody hears of the updates",
            "value",
            "step 0: parameter 1 is [1, 1, 1, 1], should be [1.1, 1.1, 1.1, 1.1]",
            {"dist.broadcast(parameter.detach(), src=i % n)": "pass"},
        ),
        WrongAnswer(
            "takes everything from rank 0",
            "value",
            "step 0: parameter 1 is [1, 1, 1, 1], should be [1.1, 1.1, 1.1, 1.1]",
            {"src=i % n": "src=0"},
        ),
        WrongAnswer(
            "only the owner calls broadcast",
            "runs",
            "All ranks must make the same call, with tensors of the same shape and dtype",
            {"dist.broadcast(parameter": "if i % n == rank: dist.broadcast(parameter"},
        ),
    ),
    "reduce_to_owners": (
        WrongAnswer(
            "reads what reduce leaves behind on the others",
            "value",
            "parameters: the gradient of parameter 1 is",
            {"if i % n != rank:\n            parameter.grad = None": "pass"},
        ),
        WrongAnswer(
            "an all-reduce, of which n - 1 throw the result away",
            "cost",
            "0 bytes from one rank, budget",
            {"dist.reduce(parameter.grad, dst=i % n)": "dist.all_reduce(parameter.grad)"},
        ),
        WrongAnswer(
            "the sum, not the mean",
            "value",
            "parameters: the gradient of parameter 0 is",
            {"        parameter.grad /= n\n": ""},
        ),
        WrongAnswer(
            "reduces everything to rank 0",
            "value",
            "parameters: the gradient of parameter 1 is",
            {"dst=i % n": "dst=0"},
        ),
    ),
    "bytes_held": (
        WrongAnswer(
            "ZeRO-1 shares out the gradients too",
            "value",
            "stage 1, 8 ranks: the result is 44000, should be 72000",
            {"share if stage >= 2": "share if stage >= 1"},
        ),
        WrongAnswer(
            "one number of state per parameter",
            "value",
            "stage 0: the result is 12000, should be 16000",
            {"2 * (share": "(share"},
        ),
        WrongAnswer(
            "ZeRO-3 keeps the weights whole",
            "value",
            "stage 3, 8 ranks: the result is 44000, should be 16000",
            {"weights = share if stage >= 3 else parameters": "weights = parameters"},
        ),
        WrongAnswer(
            "counts numbers, not bytes",
            "value",
            "stage 0: the result is 4000, should be 16000",
            {"return 4 * ": "return "},
        ),
    ),
}
