"""Wrong answers to the exercises of lesson 01."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "all_reduce_in_two_steps": (
        WrongAnswer(
            "reads the sum on ranks that never got it",
            fails="value",
            says="root=0: `tensor` is",
            edits={
                "    dist.broadcast(tensor, root)\n": "",
            },
        ),
        WrongAnswer(
            "hands on rank 0's tensor, whoever holds the sum",
            fails="value",
            says="root=1: `tensor` is",
            edits={
                "dist.broadcast(tensor, root)": "dist.broadcast(tensor, 0)",
            },
        ),
        WrongAnswer(
            "torch's own all-reduce",
            fails="steps",
            says="what it calls is all_reduce, should be reduce at rank 0, then broadcast at rank 0",
            body="""
            dist.all_reduce(tensor)
            """,
        ),
        WrongAnswer(
            "only the root calls reduce",
            fails="runs",
            says="All ranks must make the same call",
            edits={
                "dist.reduce(tensor, root)": ("if dist.get_rank() == root:\n        dist.reduce(tensor, root)"),
            },
        ),
        WrongAnswer(
            "always goes by way of rank 0",
            fails="steps",
            says="what it calls is reduce at rank 0, then broadcast at rank 0, should be reduce at",
            body="""
            dist.reduce(tensor, 0)
            dist.broadcast(tensor, 0)
            """,
        ),
    ),
    "all_gather_uneven": (
        WrongAnswer(
            "takes all tensors for float32",
            fails="value",
            says="integers, with zeros at the end: the result[0] has dtype float32, should have int64",
            edits={"tensor.new_zeros": "torch.zeros", "tensor.new_empty": "torch.empty"},
        ),
        WrongAnswer(
            "leaves the padding in",
            fails="value",
            says="rank r has r + 1 elements: the result[0] has shape",
            edits={
                "pieces[rank][: int(lengths[rank])]": "pieces[rank]",
            },
        ),
        WrongAnswer(
            "a list of n times the same tensor",
            fails="value",
            says="the last rank has none: the result[0] is",
            edits={
                "[tensor.new_empty(longest) for _ in range(world_size)]": "[tensor.new_empty(longest)] * world_size",
            },
        ),
        WrongAnswer(
            "cuts every piece to its own length",
            fails="value",
            says="rank r has r + 1 elements: the result[1] has shape (1,), should have (2,)",
            edits={
                "[: int(lengths[rank])]": "[: len(tensor)]",
            },
        ),
        WrongAnswer(
            "pickles the tensors: right, but many bytes",
            fails="cost",
            says="bytes from one rank, budget",
            body="""
            pieces = [None] * world_size
            dist.all_gather_object(pieces, tensor)
            """,
        ),
        WrongAnswer(
            "takes zeros for padding",
            fails="value",
            says="zeros at the end: the result[1] has shape (1,), should have (2,)",
            edits={
                "pieces[rank][: int(lengths[rank])]": "pieces[rank][pieces[rank] != 0]",
            },
        ),
        WrongAnswer(
            "sends tensors of different lengths",
            fails="runs",
            says=" raised ValueError: rank 0 called all_gather of 1 × float32, rank",
            body="""
            pieces = [torch.empty_like(tensor) for _ in range(world_size)]
            dist.all_gather(pieces, tensor)
            """,
        ),
    ),
}
