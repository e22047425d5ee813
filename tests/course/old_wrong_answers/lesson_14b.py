"""Wrong answers to the exercises of lesson 14b."""

from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "shift": (
        WrongAnswer(
            "hands on to the left",
            fails="value",
            says="Rank 0, one tensor: the result for 6 numbers is",
            edits={"return hand_on(mine, 1)": "return hand_on(mine, -1)"},
        ),
        WrongAnswer(
            "hands gradients on to the right as well",
            fails="value",
            says="Rank 0, one tensor, backward: the gradient for 6 numbers is",
            edits={"return hand_on(gradient, -1)": "return hand_on(gradient, 1)"},
        ),
        WrongAnswer(
            "leaves the gradient where it is",
            fails="value",
            says="Rank 0, one tensor, backward: the gradient for 6 numbers is",
            edits={"return hand_on(gradient, -1)": "return gradient"},
        ),
        WrongAnswer(
            "autograd knows nothing of it",
            fails="value",
            says="Rank 0, one tensor, backward: the gradient for 6 numbers is None",
            edits={"return Shift.apply(tensor)": "return hand_on(tensor.detach(), 1)"},
        ),
        WrongAnswer(
            "every rank sends before it receives",
            fails="runs",
            says="one tensor: Ranks 0, 1, 2 and 3 did not come back",
            edits={
                "sending = dist.isend(": "dist.send(",
                "        sending.wait()\n": "",
            },
        ),
        WrongAnswer(
            "gathers everything",
            fails="cost",
            says="calls all_gather, should be made of send and recv only",
            edits={
                "arriving = torch.empty_like(mine)": "parts = [torch.empty_like(mine) for _ in range(n)]",
                "        sending = dist.isend(mine, group=group, group_dst=(rank + step) % n)\n": "",
                "dist.recv(arriving, group=group, group_src=(rank - step) % n)": (
                    "dist.all_gather(parts, mine, group=group)"
                ),
                "        sending.wait()\n": "",
                "return arriving": "return parts[(rank - step) % n]",
            },
        ),
        WrongAnswer(
            "the gradient goes to both neighbours and is added up",
            fails="value",
            says="Rank 0, one tensor, backward: the gradient for 6 numbers is",
            edits={"return hand_on(gradient, -1)": "return hand_on(gradient, -1) + hand_on(gradient, 1)"},
            also=("cost",),
        ),
        WrongAnswer(
            "sends strided tensors as they are",
            fails="runs",
            says="tensors of every kind: Ranks 0, 1, 2 and 3 raised RuntimeError: input tensor has to be contiguous",
            edits={"        mine = mine.contiguous()\n": ""},
        ),
        WrongAnswer(
            "writes into the tensor it was given",
            fails="untouched",
            says="Rank 0, one tensor: tensor['6 numbers'] lies in other memory",
            edits={"return Shift.apply(tensor)": "tensor.data = Shift.apply(tensor).detach()\n    return tensor"},
            also=("value",),
        ),
        WrongAnswer(
            "asks for the default group's numbers",
            fails="runs",
            says="in a group of ranks 1, 2 and 3",
            edits={"rank, n = dist.get_rank(group), dist": "rank, n = dist.get_rank(), dist"},
        ),
        WrongAnswer(
            "sends everything in float32",
            fails="value",
            says="tensors of every kind: the result for float64, 2 × 2",
            edits={
                "mine = mine.contiguous()": "dtype, mine = mine.dtype, mine.contiguous()\n"
                "        mine = mine.float() if mine.is_floating_point() else mine",
                "return arriving": "return arriving.to(dtype)",
            },
        ),
        WrongAnswer(
            "receives into the same buffer each time",
            fails="untouched",
            says="backward: argument 1['results']['6 numbers'] has other values than before",
            edits={
                "    def hand_on(mine, step):": "    buffers = dist.__dict__.setdefault('buffers', {})\n\n"
                "    def hand_on(mine, step):",
                "arriving = torch.empty_like(mine)": (
                    "arriving = buffers.setdefault((mine.shape, mine.dtype), torch.empty_like(mine))"
                ),
            },
        ),
        WrongAnswer(
            "an empty tensor has no gradient",
            fails="value",
            says="the gradient for no elements, 0 × 3 is None, should be a Tensor",
            edits={"return Shift.apply(tensor)": "return Shift.apply(tensor) if tensor.numel() else tensor.detach()"},
        ),
        WrongAnswer(
            "does not wait until its own message has been sent",
            fails="waits",
            says="Rank 0, one tensor: send was started",
            edits={"        sending.wait()\n": ""},
        ),
        WrongAnswer(
            "hands large tensors on in pieces",
            fails="cost",
            says="tensors of every kind: 64 messages, budget 60",
            edits={
                "sending = dist.isend(mine, group=group, group_dst=(rank + step) % n)": "large = mine.numel() > 2**16",
                "dist.recv(arriving, group=group, group_src=(rank - step) % n)": (
                    "parts = [(mine, arriving)]\n"
                    "        if large:\n"
                    "            parts = zip(mine.view(-1).split(2**16), arriving.view(-1).split(2**16))"
                ),
                "sending.wait()": (
                    "for leaving, coming in parts:\n"
                    "            sending = dist.isend(leaving, group=group, group_dst=(rank + step) % n)\n"
                    "            dist.recv(coming, group=group, group_src=(rank - step) % n)\n"
                    "            sending.wait()"
                ),
            },
        ),
    ),
    "send_rows": (
        WrongAnswer(
            "as many come as go",
            fails="runs",
            says="elements to rank",
            edits={"received = arriving.tolist()": "received = counts"},
        ),
        WrongAnswer(
            "swaps what goes and what comes",
            fails="runs",
            says="raised RuntimeError: Split sizes doesn't match total dim 0 size",
            edits={"rows.contiguous(), received, counts": "rows.contiguous(), counts, received"},
        ),
        WrongAnswer(
            "gathers everyone's counts",
            fails="cost",
            says="calls all_gather once, budget 0",
            edits={
                "arriving = torch.empty_like(leaving)": (
                    "table = [torch.empty_like(leaving) for _ in range(dist.get_world_size(group))]"
                ),
                "dist.all_to_all_single(arriving, leaving": "dist.all_gather(table, leaving",
                "arriving.tolist()": "[int(row[dist.get_rank(group)]) for row in table]",
            },
        ),
        WrongAnswer(
            "pads every piece to the longest",
            fails="cost",
            says="calls all_reduce once, budget 0",
            body="""
                n = dist.get_world_size(group)
                leaving = torch.tensor(counts, device=rows.device)
                arriving = torch.empty_like(leaving)
                dist.all_to_all_single(arriving, leaving, group=group)
                received, longest = arriving.tolist(), torch.tensor([max(counts)], device=rows.device)
                dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
                padded = rows.new_zeros(n, int(longest), rows.shape[1])
                for place, part in zip(padded, rows.split(counts)):
                    place[: len(part)] = part
                result = torch.empty_like(padded)
                dist.all_to_all_single(result, padded, group=group)
                return torch.cat([part[:count] for part, count in zip(result, received)])
            """,
        ),
        WrongAnswer(
            "gathers all rows and picks its own",
            fails="cost",
            says="calls all_gather",
            body="""
                n, rank = dist.get_world_size(group), dist.get_rank(group)
                everyones = [None] * n
                dist.all_gather_object(everyones, (rows.cpu(), counts), group=group)
                mine = [part.split(its)[rank].to(rows.device) for part, its in everyones]
                return torch.cat(mine)
            """,
        ),
        WrongAnswer(
            "one message after another",
            fails="cost",
            says="calls recv",
            body="""
                n, rank = dist.get_world_size(group), dist.get_rank(group)
                leaving = torch.tensor(counts, device=rows.device)
                arriving = torch.empty_like(leaving)
                dist.all_to_all_single(arriving, leaving, group=group)
                received = arriving.tolist()
                pieces = [rows.new_empty(count, rows.shape[1]) for count in received]
                works = []
                for other, part in enumerate(rows.contiguous().split(counts)):
                    if other == rank:
                        pieces[rank] = part
                        continue
                    if len(part):
                        works.append(dist.isend(part, group=group, group_dst=other))
                    if received[other]:
                        works.append(dist.irecv(pieces[other], group=group, group_src=other))
                for work in works:
                    work.wait()
                return torch.cat(pieces)
            """,
        ),
        WrongAnswer(
            "its own rows first",
            fails="value",
            says="two rows to each: the result is",
            edits={
                "return result": (
                    "rank, parts = dist.get_rank(group), list(result.split(received))\n"
                    "    return torch.cat([parts.pop(rank), *parts])"
                )
            },
        ),
        WrongAnswer(
            "sends strided rows as they are",
            fails="runs",
            says="raised ValueError: Tensors must be contiguous",
            edits={"rows.contiguous()": "rows"},
        ),
        WrongAnswer(
            "drops what is beyond a capacity of three rows for each rank",
            fails="value",
            says="two rows to each from rank 0, others from the others: the result has shape",
            edits={
                "leaving = torch.tensor(counts, device=rows.device)": (
                    "rows = torch.cat([part[:3] for part in rows.split(counts)])\n"
                    "    counts = [min(count, 3) for count in counts]\n"
                    "    leaving = torch.tensor(counts, device=rows.device)"
                )
            },
        ),
        WrongAnswer(
            "pads, and leaves the padding in",
            fails="value",
            says="two rows to each from rank 0, others from the others: the result has shape",
            body="""
                most = torch.tensor(counts, device=rows.device)
                dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
                n, longest = len(counts), max(most.tolist())
                padded = rows.new_zeros(n, longest, rows.shape[1])
                for place, part in zip(padded, rows.split(counts)):
                    place[: len(part)] = part
                result = torch.empty_like(padded)
                dist.all_to_all_single(result, padded, group=group)
                return result.flatten(0, 1)
            """,
            also=("cost",),
        ),
        WrongAnswer(
            "a rank without rows leaves",
            fails="runs",
            says="nothing from rank 0 and nothing to it, bfloat16: Ranks 1, 2 and 3 did not come back",
            edits={
                "result = rows.new_empty(": (
                    "if not sum(received) + sum(counts):\n        return rows.clone()\n    result = rows.new_empty("
                )
            },
        ),
        WrongAnswer(
            "rows of zeros are padding",
            fails="value",
            says="NaN, inf, 0 and -0.0: the result has shape",
            edits={"return result": "return result[result.ne(0).any(dim=1)] if rows.shape[1] == 1 else result"},
        ),
        WrongAnswer(
            "integers travel as float64",
            fails="value",
            says="int64: the result is wrong in",
            edits={
                "result = rows.new_empty(": "dtype, rows = rows.dtype, rows.double()\n    result = rows.new_empty(",
                "return result": "return result.to(dtype)",
            },
            also=("cost",),
        ),
        WrongAnswer(
            "sends wide rows in two halves",
            fails="cost",
            says="two rows to each, of many columns: calls all_to_all 3 times, budget 2.",
            edits={
                "dist.all_to_all_single(result, rows.contiguous(), received, counts, group=group)": (
                    "for leaving, coming in zip(rows.split(2**15, dim=1), result.split(2**15, dim=1)):\n"
                    "        part = torch.empty_like(coming, memory_format=torch.contiguous_format)\n"
                    "        dist.all_to_all_single(part, leaving.contiguous(), received, counts, group=group)\n"
                    "        coming.copy_(part)"
                ),
            },
        ),
    ),
}
