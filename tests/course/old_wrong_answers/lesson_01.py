"""Wrong answers to the exercises of lesson 01."""

from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "all_reduce_in_two_steps": (
        WrongAnswer(
            "a rank that has nothing but zeros leaves the reduce out",
            fails="runs",
            says="zeros on one rank that is not the root: rank ",
            body="""
                if dist.get_rank() == root or tensor.numel() == 0 or tensor.any():
                    dist.reduce(tensor, root)
                dist.broadcast(tensor, root)
            """,
        ),
        WrongAnswer(
            "many elements go in several pieces",
            fails="cost",
            says="more elements than fit into a MiB: calls reduce twice, budget 1.",
            body="""
                for piece in tensor.view(-1).split(2**20) if tensor.numel() else [tensor]:
                    dist.reduce(piece, root)
                    dist.broadcast(piece, root)
            """,
        ),
        WrongAnswer(
            "reads the sum on ranks that never got it",
            fails="value",
            says="Rank 1, root=0: tensor is",
            edits={"    dist.broadcast(tensor, root)\n": ""},
            also=("agreement",),
        ),
        WrongAnswer(
            "hands on rank 0's tensor, whoever holds the sum",
            fails="value",
            says="Rank 0, root=1: tensor is",
            edits={"dist.broadcast(tensor, root)": "dist.broadcast(tensor, 0)"},
            also=("root",),
        ),
        WrongAnswer(
            "reduces to one rank after the other",
            fails="cost",
            says="calls reduce 4 times, budget 1.",
            body="""
                mine = tensor.clone()
                for target in range(dist.get_world_size()):
                    part = mine.clone()
                    dist.reduce(part, target)
                    if dist.get_rank() == target:
                        tensor.copy_(part)
            """,
            also=("root",),
        ),
        WrongAnswer(
            "makes a vector of a scalar, for good",
            fails="untouched",
            says="has another shape",
            edits={
                "    dist.reduce(tensor, root)\n": (
                    "    if tensor.dim() == 0:\n        tensor.unsqueeze_(0)\n    dist.reduce(tensor, root)\n"
                )
            },
        ),
        WrongAnswer(
            "torch's own all-reduce",
            fails="cost",
            says="calls all_reduce once, budget 0.",
            body="dist.all_reduce(tensor)",
        ),
        WrongAnswer(
            "only the root calls reduce",
            fails="runs",
            says="did not come back",
            edits={"dist.reduce(tensor, root)": "if dist.get_rank() == root:\n        dist.reduce(tensor, root)"},
        ),
        WrongAnswer(
            "always goes by way of rank 0",
            fails="root",
            says="root=1: goes by way of rank 0",
            body="""
                dist.reduce(tensor, 0)
                dist.broadcast(tensor, 0)
            """,
        ),
        WrongAnswer(
            "adds up in float32",
            fails="value",
            says="int32 above 2",
            body="""
                t=tensor.float()
                dist.reduce(t, root)
                dist.broadcast(t, root)
                tensor.copy_(t)
            """,
            also=("cost",),
        ),
        WrongAnswer(
            "adds up int32 in float32",
            fails="value",
            says="int32 above 2²⁴, root=",
            body="""
                t = tensor.float() if tensor.dtype == torch.int32 else tensor
                dist.reduce(t, root)
                dist.broadcast(t, root)
                tensor.copy_(t)
            """,
        ),
        WrongAnswer(
            "sums the larger tensor that it is a part of",
            fails="untouched",
            says="root=0: larger tensor, beside `tensor`, is",
            body="""
                whole = tensor if tensor._base is None else tensor._base
                dist.reduce(whole, root)
                dist.broadcast(whole, root)
            """,
            also=("cost",),
        ),
        WrongAnswer(
            "hides NaN and infinity",
            fails="value",
            says="float32 with NaN, infinity and -0.0: tensor is [0, 3.40282e+38,",
            edits={"    dist.broadcast(tensor, root)\n": "    dist.broadcast(tensor.nan_to_num_(), root)\n"},
        ),
        WrongAnswer(
            "leaves out ranks that have nothing to add",
            fails="runs",
            says="would wait for ever",
            edits={"    dist.reduce": "    if tensor.numel() and not tensor.any():\n        return\n    dist.reduce"},
        ),
        WrongAnswer(
            "puts the sum into other memory",
            fails="untouched",
            says="lies in other memory than before",
            body="""
                t=tensor.clone()
                dist.reduce(t, root)
                dist.broadcast(t, root)
                tensor.data = t
            """,
            also=("value",),
        ),
    ),
    "all_gather_uneven": (
        WrongAnswer(
            "takes float32 for the default dtype",
            fails="value",
            says="lengths [6, 3, 0], float64 is the default dtype: the result at entry 0 ",
            edits={"tensor.new_zeros": "torch.zeros", "tensor.new_empty": "torch.empty"},
            also=("cost",),
        ),
        WrongAnswer(
            "makes float32 the default dtype",
            fails="untouched",
            says="leaves torch.float32 as the default dtype",
            edits={
                "    longest = int(max(lengths))\n": (
                    "    torch.set_default_dtype(torch.float32)\n    longest = int(max(lengths))\n"
                ),
                "tensor.new_zeros": "torch.zeros",
            },
        ),
        WrongAnswer(
            "a value marks the end",
            fails="value",
            says="rank 0's result at entry",
            edits={
                "tensor.new_zeros(longest)": "tensor.new_full((longest,), -1e9)",
                "pieces[rank][: int(lengths[rank])] for rank": "pieces[rank][pieces[rank] != -1e9] for rank",
            },
        ),
        WrongAnswer(
            "pads what is shorter, and sends the longest as it lies there",
            fails="runs",
            says="all_gather takes contiguous tensors only",
            edits={
                "    padded = tensor.new_zeros(longest)\n    padded[: len(tensor)] = tensor\n": (
                    "    padded = tensor\n    if len(tensor) < longest:\n"
                    "        padded = tensor.new_zeros(longest)\n        padded[: len(tensor)] = tensor\n"
                )
            },
        ),
        WrongAnswer(
            "leaves the padding in",
            fails="value",
            says="Rank 0, lengths [1, 2, 3, 4]: the result at entry 0 has shape (4,), should have (1,).",
            edits={"pieces[rank][: int(lengths[rank])]": "pieces[rank]"},
        ),
        WrongAnswer(
            "a list of n times the same tensor",
            fails="value",
            says="Rank 0, lengths [1, 2, 3, 4]: the result at entry 0 is [1000], should be [1].",
            edits={
                "[tensor.new_empty(longest) for _ in range(world_size)]": "[tensor.new_empty(longest)] * world_size"
            },
        ),
        WrongAnswer(
            "cuts every piece to its own length",
            fails="value",
            says="Rank 0, lengths [1, 2, 3, 4]: the result at entry 1 has shape (1,), should have (2,).",
            edits={"[: int(lengths[rank])]": "[: len(tensor)]"},
            also=("agreement",),
        ),
        WrongAnswer(
            "one tensor in place of a list",
            fails="value",
            says="the result is a Tensor, should be a list",
            edits={
                "pieces = [pieces[rank]": "pieces = torch.cat([pieces[rank]",
                "])] for rank in range(world_size)]": "])] for rank in range(world_size)])",
            },
        ),
        WrongAnswer(
            "pickles the tensors: right, but many bytes",
            fails="cost",
            says="bytes from one rank, budget 72.",
            body="pieces = [None] * world_size\ndist.all_gather_object(pieces, tensor)",
        ),
        WrongAnswer(
            "takes zeros for padding",
            fails="value",
            says="all lengths are equal: rank 0's result at entry 0 has shape (3,), should have (4,)",
            edits={"pieces[rank][: int(lengths[rank])]": "pieces[rank][pieces[rank] != 0]"},
        ),
        WrongAnswer(
            "adds to zeros, so that -0.0 becomes 0.0",
            fails="value",
            says="result differs in some bits, as 0.0 and -0.0 do",
            edits={"padded[: len(tensor)] = tensor": "padded[: len(tensor)] += tensor"},
        ),
        WrongAnswer(
            "takes the longest tensor to have 1,000 elements more than its own at most",
            fails="runs",
            says="calls all_gather of",
            edits={"longest = int(max(lengths))": "longest = min(int(max(lengths)), len(tensor) + 1000)"},
        ),
        WrongAnswer(
            "multiplies by 1, which changes the bits of some NaN",
            fails="value",
            says="result differs in some bits",
            edits={"padded[: len(tensor)] = tensor": "padded[: len(tensor)] = tensor * 1.0"},
        ),
        WrongAnswer(
            "forgets where in its storage the tensor begins",
            fails="value",
            says="rank 0's result at entry 0 is [0], should be [2]",
            edits={
                "padded[: len(tensor)] = tensor": "part = tensor\n"
                "    if tensor.is_contiguous():\n"
                "        part = tensor.as_strided(tensor.shape, tensor.stride(), 0)\n"
                "    padded[: len(tensor)] = part"
            },
        ),
        WrongAnswer(
            "sends the length as a float32",
            fails="length",
            says="is sent in 4 bytes, should be one int64",
            edits={
                "dtype=torch.int64": "dtype=torch.float32",
                "torch.tensor([len(tensor)],": "torch.tensor([float(len(tensor))],",
            },
        ),
        WrongAnswer(
            "reads the memory of a strided tensor as it lies",
            fails="value",
            says="every second element of a tensor",
            edits={"padded[: len(tensor)] = tensor": "padded[: len(tensor)] = tensor.as_strided((len(tensor),), (1,))"},
            also=("runs",),
        ),
    ),
}
