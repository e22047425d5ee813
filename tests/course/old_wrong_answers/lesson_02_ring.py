"""Wrong answers to `ring_all_reduce` of lesson 02."""

from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "ring_all_reduce": (
        WrongAnswer(
            "two ranks exchange the whole tensor",
            fails="chunks",
            says="if there were 2 ranks: a message has 1,048,579 bytes, should have 524,290 at most",
            edits={
                "    chunks = ": "    if n == 2:\n        arriving = torch.empty_like(tensor)\n"
                "        send_recv(tensor, 1 - rank, arriving, 1 - rank, group)\n        return tensor.add_(arriving)\n"
                "    chunks = "
            },
        ),
        WrongAnswer(
            "half a tensor of room, which is too much for more than four ranks",
            fails="memory",
            says="bytes that it has received into beside `tensor`, budget ",
            edits={
                "torch.empty_like(chunks[0])": "tensor.new_empty(max(chunks[0].numel(), tensor.numel() // 2))",
            },
        ),
        WrongAnswer(
            "cuts between rows only",
            fails="cost",
            says="if there were 3 ranks, int32 above 2²⁴: sends 24 bytes, budget 16",
            edits={
                "tensor.view(-1).tensor_split(n)": "torch.atleast_1d(tensor).tensor_split(n)",
                "buffer[: mine.numel()], left, group)\n        mine += buffer[: mine.numel()]": (
                    "buffer[: len(mine)], left, group)\n        mine += buffer[: len(mine)]"
                ),
            },
        ),
        WrongAnswer(
            "the false ring: whole tensors go round (pytorch/tutorials#1039)",
            fails="cost",
            says="4 ranks, 15 elements: 180 bytes from one rank, budget 96.",
            body="""
                total = tensor.clone()
                leaving, arriving = tensor.clone(), torch.empty_like(tensor)
                for step in range(n - 1):
                    send_recv(leaving, (rank + 1) % n, arriving, (rank - 1) % n, group)
                    total += arriving
                    leaving, arriving = arriving, leaving
                tensor.copy_(total)
            """,
            also=("agreement", "chunks"),  # every rank adds in another order
        ),
        WrongAnswer(
            "the last chunk takes the remainder",
            fails="chunks",
            says="Rank 0, 15 elements: a message has 24 bytes, should have 16 at most.",
            edits={
                "tensor.view(-1).tensor_split(n)": "tensor.view(-1).split(\n"
                "        [tensor.numel() // n] * (n - 1) + [tensor.numel() - tensor.numel() // n * (n - 1)])",
                "torch.empty_like(chunks[0])": "torch.empty_like(chunks[-1])",
            },
        ),
        WrongAnswer(
            "works on a copy of the whole tensor",
            fails="memory",
            says="1,201 elements of float16: holds 2,703 elements at once, budget 602.",
            body="""
                chunks = tensor.clone().view(-1).tensor_split(n)
                buffer = torch.empty_like(chunks[0])
                left, right = (rank - 1) % n, (rank + 1) % n
                for step in range(n - 1):
                    mine = chunks[(rank - step - 1) % n]
                    send_recv(chunks[(rank - step) % n], right, buffer[: mine.numel()], left, group)
                    mine += buffer[: mine.numel()]
                for step in range(n - 1):
                    send_recv(chunks[(rank + 1 - step) % n], right, chunks[(rank - step) % n], left, group)
                tensor.view(-1).copy_(torch.cat(chunks))
            """,
        ),
        WrongAnswer(
            "one rank after the other",
            fails="cost",
            says="4 ranks, 15 elements: depth 24, budget 6.",
            edits={
                "    for step in range(n - 1):  # reduce": "    def send_recv(leaving, dst, arriving, src, group):\n"
                "        if rank:\n"
                "            dist.send(leaving, group=group, group_dst=dst)\n"
                "        else:\n"
                "            leaving = leaving.clone()\n"
                "        dist.recv(arriving, group=group, group_src=src)\n"
                "        if not rank:\n"
                "            dist.send(leaving, group=group, group_dst=dst)\n\n"
                "    for step in range(n - 1):  # reduce"
            },
        ),
        WrongAnswer(
            "takes n to divide the number of elements",
            fails="runs",
            says="15 elements: Ranks 0, 1, 2 and 3 raised RuntimeError: shape '[4, -1]' is invalid",
            edits={"tensor.view(-1).tensor_split(n)": "tensor.view(n, -1)"},
        ),
        WrongAnswer(
            "drops the remainder",
            fails="value",
            says="15 elements: tensor is wrong in 3 of 15 elements: element 12 is",
            edits={"view(-1).tensor_split(n)": "view(-1)[: tensor.numel() // n * n].tensor_split(n)"},
            also=("agreement",),
        ),
        WrongAnswer(
            "chunk(n) makes fewer than n chunks of a small tensor",
            fails="runs",
            says="raised IndexError",
            edits={"tensor_split(n)": "chunk(n)"},
        ),
        WrongAnswer(
            "the complete chunks are never passed on",
            fails="value",
            says="Rank 0, 15 elements: tensor is wrong in 1",
            edits={"for step in range(n - 1):  # all-gather": "for step in range(0):  # all-gather"},
            also=("agreement",),
        ),
        WrongAnswer(
            "every rank sends first, then receives",
            fails="runs",
            says="did not come back",
            edits={
                "    for step in range(n - 1):  # reduce": "    def send_recv(leaving, dst, arriving, src, group):\n"
                "        dist.send(leaving, group=group, group_dst=dst)\n"
                "        dist.recv(arriving, group=group, group_src=src)\n\n"
                "    for step in range(n - 1):  # reduce"
            },
        ),
        WrongAnswer(
            "the ring is not closed",
            fails="runs",
            says="there is no rank -1 among 4",
            edits={"(rank - 1) % n, (rank + 1) % n": "rank - 1, rank + 1"},
        ),
        WrongAnswer(
            "rounds up to a multiple of n where it lies, over what is beside it",
            fails="untouched",
            says="15 elements: larger tensor, beside `tensor`, ",
            edits={
                "tensor.view(-1).tensor_split(n)": "tensor.view(-1).tensor_split(n)\n"
                "    if tensor.numel() % n == n - 1 > 0:\n"
                "        padded = torch.as_strided(tensor, (tensor.numel() + 1,), (1,))\n"
                "        padded[-1] = 0\n"
                "        chunks = padded.tensor_split(n)"
            },
        ),
        WrongAnswer(
            "knows six ranks at most",
            fails="runs",
            says="float64, an element more than ranks",
            edits={"(rank + 1) % n\n": "(rank + 1) % min(n, 6)\n"},
        ),
        WrongAnswer(
            "calls the package's ring",
            fails="own",
            says="The answer calls the package's ring_all_reduce",
            body="""
                import scratch_ddp.collectives as c
                c.ring_all_reduce(tensor, group)
            """,
        ),
    ),
}
