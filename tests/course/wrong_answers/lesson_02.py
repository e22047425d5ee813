"""Wrong answers to the exercises of lesson 02."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "tree_broadcast": (
        WrongAnswer("the source is taken to be rank 0", "value", "src=1: `tensor`", {"(rank - root) % n": "rank"}),
        WrongAnswer(
            "the reach grows by one a round, so that the last rank is served twice",
            "cost",
            "ranks, src=0: 4 messages, budget 3",
            {"reach *= 2": "reach += 1"},
            n=(4,),
        ),
        WrongAnswer(
            "a star: the source sends to one after the other",
            "cost",
            "ranks, src=0: 12,000 bytes from one rank, budget 8,000",
            body="""
            for other in range(n):
                if rank == root and other != root:
                    dist.send(tensor, group=group, group_dst=other)
                elif rank == other != root:
                    dist.recv(tensor, group=group, group_src=root)
            """,
            n=(4,),
        ),
        WrongAnswer(
            "torch's own broadcast",
            "cost",
            "ranks, src=0: rank 0 calls broadcast once, budget 0",
            body="dist.broadcast(tensor, src, group)",
        ),
        WrongAnswer(
            "every rank waits to be given the values, the source too",
            "runs",
            "Rank 0 waits for a message that rank",
            body="dist.recv(tensor, group=group, group_src=(rank - 1) % n)",
        ),
        WrongAnswer(
            "forgets the group",
            "group",
            "recv goes through all ranks, should stay in `group`. Rank 3 too",
            {
                "dist.send(tensor, group=group, group_dst=(rank + reach) % n)": "dist.send(tensor, (rank + reach) % n)",
                "dist.recv(tensor, group=group, group_src=(rank - reach) % n)": "dist.recv(tensor, (rank - reach) % n)",
            },
            n=(4,),
        ),
    ),
    "reduce": (
        WrongAnswer(
            "sums up in the caller's tensor",
            "untouched",
            "dst=0: `tensor`",
            {"total = arriving.add_(total)": "total = tensor.add_(arriving)"},
            n=(4,),
        ),
        WrongAnswer(
            "keeps everything that arrives",
            "memory",
            "dst=0: holds 3,000 elements beside its arguments, budget 2,000",
            {"total = arriving.add_(total)": "total = arriving + total"},
            n=(4,),
        ),
        WrongAnswer("the tree always ends at rank 0", "value", "dst=1: `tensor`", {"(rank - root) % n": "rank"}),
        WrongAnswer(
            "dst receives from one rank after the other",
            "cost",
            "ranks, dst=0: 3 rounds one after another, budget 2",
            body="""
            if rank != root:
                dist.send(tensor, group=group, group_dst=root)
            else:
                arriving = torch.empty_like(tensor)
                for other in range(n):
                    if other != root:
                        dist.recv(arriving, group=group, group_src=other)
                        tensor += arriving
            """,
            n=(4,),
        ),
        WrongAnswer(
            "torch's own all-reduce, on a copy",
            "cost",
            "ranks, dst=0: rank 0 calls all_reduce once, budget 0",
            body="""
            total = tensor.clone()
            dist.all_reduce(total, group=group)
            if rank == root:
                tensor.copy_(total)
            """,
        ),
    ),
    "ring_all_reduce": (
        WrongAnswer(
            "the false ring: whole tensors go round (pytorch/tutorials#1039)",
            "cost",
            "budget",
            body="""
            total = tensor.clone()
            leaving, arriving = tensor.clone(), torch.empty_like(tensor)
            for step in range(n - 1):
                send_recv(leaving, (rank + 1) % n, arriving, (rank - 1) % n, group)
                total += arriving
                leaving, arriving = arriving, leaving
            tensor.copy_(total)
            """,
        ),
        WrongAnswer(
            "takes n to divide the number of elements",
            "runs",
            "elements: Rank 0 raised RuntimeError: shape '",
            {"tensor.view(-1).tensor_split(n)": "tensor.view(n, -1)"},
        ),
        WrongAnswer(
            "drops the remainder",
            "value",
            "elements: the result is",
            {"view(-1).tensor_split(n)": "view(-1)[: tensor.numel() // n * n].tensor_split(n)"},
        ),
        WrongAnswer(
            "chunk(n) makes fewer than n chunks of a small tensor",
            "runs",
            ": Rank 0 raised IndexError: tuple index out of range",
            {"tensor_split(n)": "chunk(n)"},
        ),
        WrongAnswer(
            "the complete chunks are never passed on",
            "value",
            "elements: the result is",
            {"for step in range(n - 1):  # all-gather": "for step in range(0):  # all-gather"},
        ),
        WrongAnswer(
            "every rank sends first, then receives",
            "runs",
            "Rank 0 sent to rank 1 once, rank 1 received nothing",
            {
                "    for step in range(n - 1):  # reduce": (
                    "    def send_recv(leaving, dst, arriving, src, group):\n"
                    "        dist.send(leaving, group=group, group_dst=dst)\n"
                    "        dist.recv(arriving, group=group, group_src=src)\n\n"
                    "    for step in range(n - 1):  # reduce"
                )
            },
        ),
        WrongAnswer(
            "works on a copy of the whole tensor",
            "memory",
            "elements beside its arguments, budget",
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
    ),
}
