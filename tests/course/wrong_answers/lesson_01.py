"""Wrong answers to the exercises of lesson 01."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "all_reduce_in_two_steps": (
        WrongAnswer(
            "reads the sum on ranks that never got it",
            "value",
            "root=0: `tensor` is",
            {"    dist.broadcast(tensor, root)\n": ""},
        ),
        WrongAnswer(
            "hands on rank 0's tensor, whoever holds the sum",
            "value",
            "root=1: `tensor` is",
            {"dist.broadcast(tensor, root)": "dist.broadcast(tensor, 0)"},
        ),
        WrongAnswer(
            "torch's own all-reduce",
            "steps",
            "what it calls is all_reduce, should be reduce at rank 0, then broadcast at rank 0",
            body="dist.all_reduce(tensor)",
        ),
        WrongAnswer(
            "only the root calls reduce",
            "runs",
            "All ranks must make the same call",
            {"dist.reduce(tensor, root)": "if dist.get_rank() == root:\n        dist.reduce(tensor, root)"},
        ),
        WrongAnswer(
            "always goes by way of rank 0",
            "steps",
            "what it calls is reduce at rank 0, then broadcast at rank 0, should be reduce at",
            body="""
            dist.reduce(tensor, 0)
            dist.broadcast(tensor, 0)
            """,
        ),
    ),
    "all_gather_uneven": (
        WrongAnswer(
            "takes all tensors for float32",
            "value",
            "integers, with zeros at the end: the result[0] has dtype float32, should have int64",
            {"tensor.new_zeros": "torch.zeros", "tensor.new_empty": "torch.empty"},
        ),
        WrongAnswer(
            "leaves the padding in",
            "value",
            "rank r has r + 1 elements: the result[0] has shape",
            {"pieces[rank][: int(lengths[rank])]": "pieces[rank]"},
        ),
        WrongAnswer(
            "a list of n times the same tensor",
            "value",
            "the last rank has none: the result[0] is",
            {"[tensor.new_empty(longest) for _ in range(world_size)]": "[tensor.new_empty(longest)] * world_size"},
        ),
        WrongAnswer(
            "cuts every piece to its own length",
            "value",
            "rank r has r + 1 elements: the result[1] has shape (1,), should have (2,)",
            {"[: int(lengths[rank])]": "[: len(tensor)]"},
        ),
        WrongAnswer(
            "pickles the tensors: right, but many bytes",
            "cost",
            "bytes from one rank, budget",
            body="""
            pieces = [None] * world_size
            dist.all_gather_object(pieces, tensor)
            """,
        ),
        WrongAnswer(
            "takes zeros for padding",
            "value",
            "zeros at the end: the result[1] has shape (1,), should have (2,)",
            {"pieces[rank][: int(lengths[rank])]": "pieces[rank][pieces[rank] != 0]"},
        ),
        WrongAnswer(
            "sends tensors of different lengths",
            "runs",
            " raised ValueError: rank 0 called all_gather of 1 × float32, rank",
            body="""
            pieces = [torch.empty_like(tensor) for _ in range(world_size)]
            dist.all_gather(pieces, tensor)
            """,
        ),
    ),
}
