"""Wrong answers to the exercises of lesson 02 on trees; those on the ring are in `lesson_02_ring`."""

from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "tree_broadcast": (
        WrongAnswer(
            "large tensors go in pieces",
            fails="cost",
            says="if there were 2 ranks, rank 1 at the root: 5 messages, budget 1; depth 5, budget 1",
            body="""
            rank, n = dist.get_rank(group), dist.get_world_size(group)
            root = dist.get_group_rank(group or dist.group.WORLD, src)
            place = (rank - root) % n
            for piece in tensor.view(-1).split(1 << 18):
                reach = 1
                while reach < n:
                    if place < reach and place + reach < n:
                        dist.send(piece, group=group, group_dst=(place + reach + root) % n)
                    elif reach <= place < 2 * reach:
                        dist.recv(piece, group=group, group_src=(place - reach + root) % n)
                    reach *= 2
            """,
        ),
        WrongAnswer(
            "takes a group of as many ranks for the default group",
            fails="group",
            says="if there were 4 ranks, rank ",
            edits={"    place =": "    group = None if n == dist.get_world_size() else group\n    place ="},
        ),
        WrongAnswer(
            "the source is taken to be rank 0",
            fails="value",
            says="Rank 0, src=1: tensor is [0, 1, 2, 3, 4], should be [10, 11, 12, 13, 14].",
            edits={"(rank - root) % n": "rank"},
        ),
        WrongAnswer(
            "the reach grows by one a round, so that the last rank is served twice",
            fails="cost",
            says="60 bytes from one rank, budget 40; depth 3, budget 2. Rank 3 received twice.",
            edits={"reach *= 2": "reach += 1"},
        ),
        WrongAnswer(
            "every place serves 2 · place + 1 and 2 · place + 2",
            fails="cost",
            says=" ranks, rank ",
            body="""
                place = (rank - root) % n
                if place:
                    dist.recv(tensor, group=group, group_src=((place - 1) // 2 + root) % n)
                for child in (2 * place + 1, 2 * place + 2):
                    if child < n:
                        dist.send(tensor, group=group, group_dst=(child + root) % n)
            """,
        ),
        WrongAnswer(
            "receives from any rank",
            fails="runs",
            says="recv names no sender: a message of another call can be taken for this one",
            edits={"dist.recv(tensor, group=group, group_src=(rank - reach) % n)": "dist.recv(tensor, group=group)"},
        ),
        WrongAnswer(
            "a star: the source sends to one after the other",
            fails="cost",
            says="4 ranks, src=0: 60 bytes from one rank, budget 40; depth 3, budget 2.",
            body="""
                for other in range(n):
                    if rank == root and other != root:
                        dist.send(tensor, group=group, group_dst=other)
                    elif rank == other != root:
                        dist.recv(tensor, group=group, group_src=root)
            """,
        ),
        WrongAnswer(
            "torch's own broadcast",
            fails="cost",
            says="calls broadcast, should be made of send and recv only",
            body="dist.broadcast(tensor, src, group)",
        ),
        WrongAnswer(
            "every rank waits to be given the values, the source too",
            fails="runs",
            says="Ranks 0, 1, 2 and 3 did not come back: after",
            body="dist.recv(tensor, group=group, group_src=(rank - 1) % n)",
        ),
        WrongAnswer(
            "two rounds, which is right for four ranks",
            fails="value",
            says=" ranks, rank ",
            edits={"while reach < n": "while reach < min(n, 4)"},
        ),
        WrongAnswer(
            "multiplies the old values by zero, and NaN stays",
            fails="value",
            says="float32 with NaN, infinity and -0.0: tensor is [nan, inf, nan, 3e+38, -0], should be [1, inf, inf,",
            edits={
                "dist.recv(tensor, group=group, group_src=(rank - reach) % n)": "buffer = torch.empty_like(tensor)\n"
                "            dist.recv(buffer, group=group, group_src=(rank - reach) % n)\n"
                "            tensor.mul_(0).add_(buffer)"
            },
            also=("agreement",),
        ),
        WrongAnswer(
            "four rounds, which is right for 16 ranks",
            fails="value",
            says="if there were 17 ranks, rank ",
            edits={"while reach < n": "while reach < min(n, 16)"},
        ),
        WrongAnswer(
            "receives where the storage begins, of which the tensor is a part",
            fails="value",
            says="src=0: tensor is",
            edits={
                "dist.recv(tensor, group=group, group_src=(rank - reach) % n)": "whole = torch.as_strided("
                "tensor, (tensor.numel(),), (1,), 0)\n"
                "            dist.recv(whole, group=group, group_src=(rank - reach) % n)"
            },
            also=("untouched", "agreement"),
        ),
        WrongAnswer(
            "a tree for four ranks",
            fails="runs",
            says="in a group of ranks 1, 2 and 3",
            body="""
                s=dist.get_group_rank(group or dist.group.WORLD, src)
                p=(dist.get_rank(group)-s)%4
                if p==0:
                    dist.send(tensor,group=group,group_dst=(s+1)%4); dist.send(tensor,group=group,group_dst=(s+2)%4)
                elif p==1:
                    dist.recv(tensor,group=group,group_src=s); dist.send(tensor,group=group,group_dst=(s+3)%4)
                elif p==2: dist.recv(tensor,group=group,group_src=s)
                else: dist.recv(tensor,group=group,group_src=(s+1)%4)
            """,
        ),
    ),
    "reduce": (
        WrongAnswer(
            "adds halves in float32",
            fails="memory",
            says="1,201 elements of float16: holds",
            edits={
                "dist.send(total,": "dist.send(total.to(tensor.dtype),",
                "arriving.add_(total)": "(arriving.float() if tensor.dtype is torch.half else arriving).add_(total)",
            },
        ),
        WrongAnswer(
            "the ranks beyond a power of two all send to the root first",
            fails="cost",
            says="if there were 7 ranks",
            body="""
            place, total, core = (rank - root) % n, tensor, 1 << (n.bit_length() - 1)

            def add_from(other):
                arriving = torch.empty_like(tensor)
                dist.recv(arriving, group=group, group_src=(other + root) % n)
                return arriving.add_(total)

            if place >= core:
                dist.send(tensor, group=group, group_dst=root)
                return
            for other in range(core, n) if place == 0 else ():
                total = add_from(other)
            reach = 1
            while reach < core:
                if place % (2 * reach):
                    dist.send(total, group=group, group_dst=(place - reach + root) % n)
                    return
                total = add_from(place + reach)
                reach *= 2
            tensor.copy_(total)
            """,
        ),
        WrongAnswer(
            "a rank that can't be heard counts as zeros",
            fails="runs",
            says="if a connection broke: rank 1 returned, though recv raised an error: let the caller hear of it.",
            edits={
                "            dist.recv(arriving, group=group, group_src=(rank + reach) % n)\n": (
                    "            try:\n                dist.recv(arriving, group=group, group_src=(rank + reach) % n)\n"
                    "            except RuntimeError:\n                arriving.zero_()\n"
                )
            },
        ),
        WrongAnswer(
            "sums up in the caller's tensor",
            fails="untouched",
            says="Rank 2, dst=0: tensor is [1100, 1102, 1104, 1106, 1108, 1110], should be [100, 101,",
            edits={"total = arriving.add_(total)": "total = tensor.add_(arriving)"},
        ),
        WrongAnswer(
            "sums up in the caller's tensor, and subtracts it again",
            fails="untouched",
            says="Rank 2, float32 with NaN, infinity and -0.0: tensor is",
            edits={
                "    total = tensor\n": "    total, arrived = tensor, []\n",
                "total = arriving.add_(total)": "total = tensor.add_(arriving)\n            arrived.append(arriving)",
                "        tensor.copy_(total)\n": "        arrived = []\n"
                "    for part in arrived:\n"
                "        tensor.sub_(part)\n",
            },
        ),
        WrongAnswer(
            "keeps everything that arrives",
            fails="memory",
            says="Rank 0, 1,201 elements of float16: holds 3,603 elements at once, budget 2,402.",
            edits={"total = arriving.add_(total)": "total = arriving + total"},
        ),
        WrongAnswer(
            "the tree always ends at rank 0",
            fails="value",
            says="Rank 1, dst=1: tensor is [10, 11, 12, 13, 14, 15], should be [1111,",
            edits={"(rank - root) % n": "rank"},
        ),
        WrongAnswer(
            "dst receives from one rank after the other",
            fails="cost",
            says="4 ranks, dst=0: depth 3, budget 2.",
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
        ),
        WrongAnswer(
            "dst sends to itself as well",
            fails="runs",
            says="Rank 0 raised ValueError",
            body="""
                dist.send(tensor, group=group, group_dst=root)
                if rank == root:
                    for other in range(n):
                        arriving = torch.empty_like(tensor)
                        dist.recv(arriving, group=group, group_src=other)
                        tensor += arriving
            """,
        ),
        WrongAnswer(
            "torch's own all-reduce, on a copy",
            fails="cost",
            says="calls all_reduce, should be made of send and recv only",
            body="""
                total = tensor.clone()
                dist.all_reduce(total, group=group)
                if rank == root:
                    tensor.copy_(total)
            """,
        ),
        WrongAnswer(
            "starts from zeros, so that -0.0 becomes 0.0",
            fails="value",
            says="-0.0 on all ranks: tensor differs in some bits, as 0.0 and -0.0 do",
            edits={"total = arriving.add_(total)": "total = arriving.add_(total).add_(0)"},
        ),
        WrongAnswer(
            "keeps everything that arrives, in a list",
            fails="memory",
            says=" ranks, rank ",
            edits={
                "    total = tensor\n": "    total, kept = tensor, []\n",
                "total = arriving.add_(total)": "total = arriving.add_(total)\n            kept.append(arriving)",
            },
        ),
        WrongAnswer(
            "keeps everything that arrives, as a list of numbers",
            fails="memory",
            says="1,201 elements of float16: takes 2,402 elements out of torch by .tolist()",
            edits={
                "    total = tensor\n": "    total, kept = tensor, []\n",
                "total = arriving.add_(total)": "kept.append(arriving.tolist())\n"
                "            total = arriving.add_(total)",
            },
        ),
        WrongAnswer(
            "never waits for what it sends",
            fails="waits",
            says="send was started and never waited for, ",
            edits={"dist.send(total": "dist.isend(total"},
        ),
        WrongAnswer(
            "sends float32, whatever the tensor is",
            fails="runs",
            says="rank 1 sends 5 × float32, rank 0 receives into 5 × float16",
            edits={"    total = tensor\n": "    total = tensor.float()\n"},
        ),
        WrongAnswer(
            "refuses to work on one rank",
            fails="runs",
            says="in a group of rank 0 (numbered from 0), dst=0: Rank 0 raised ValueError",
            edits={"    total = tensor\n": "    total = tensor\n    if n == 1: raise ValueError\n"},
        ),
    ),
}
