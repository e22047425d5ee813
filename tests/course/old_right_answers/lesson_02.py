"""Unusual right answers of lesson 02: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
    "tree_broadcast": [
        {"dist.send(": "dist.isend(", "group_dst=(rank + reach) % n)": "group_dst=(rank + reach) % n).wait()"},
        {
            "group=group, group_dst=(rank + reach) % n": "members[(rank + reach) % n], group",
            "group=group, group_src=(rank - reach) % n": "members[(rank - reach) % n], group",
            "    reach = 1": "    members = dist.get_process_group_ranks(group)\n    reach = 1",
        },
        # by halves, recursively, with isend waited for and bytes sent
        """
        import math
        from scratch_ddp.collectives import send_recv

        rank, n = dist.get_rank(group), dist.get_world_size(group)
        root = dist.get_group_rank(group or dist.group.WORLD, src)
        flat = tensor.view(-1).view(torch.uint8)

        def spread(low, high):
            if high - low < 2:
                return
            middle = (low + high + 1) // 2
            place = (rank - root) % n
            if place == low:
                dist.isend(flat, group=group, group_dst=(middle + root) % n).wait()
            elif place == middle:
                dist.irecv(flat, group=group, group_src=(low + root) % n).wait()
            if place < middle:
                spread(low, middle)
            else:
                spread(middle, high)

        spread(0, n)
        """,
        # into a buffer
        """
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        root = dist.get_group_rank(group or dist.group.WORLD, src)
        place = (rank - root) % n  # the source stands at place 0, the others behind it in a circle
        reach = 1  # places 0 … reach-1 have the values
        while reach < n:
            if place < reach and place + reach < n:
                dist.send(tensor, group=group, group_dst=(rank + reach) % n)
            elif reach <= place < 2 * reach:
                buffer = torch.empty_like(tensor)
                dist.recv(buffer, group=group, group_src=(rank - reach) % n)
                tensor.copy_(buffer)
            reach *= 2
        """,
        # largest reach first, by isend and irecv
        """
        import os
        import sys
        import math
        from torch import Tensor
        from math import ceil, log2
        from scratch_ddp.collectives import send_recv

        rank, n = dist.get_rank(group), dist.get_world_size(group)
        root = dist.get_group_rank(group or dist.group.WORLD, src)
        place = (rank - root) % n
        reach = 1 << max(n - 1, 0).bit_length()
        while reach > 1:
            half = reach // 2
            if place % reach == 0 and place + half < n:
                dist.isend(tensor, group=group, group_dst=(rank + half) % n).wait()
            elif place % reach == half:
                dist.irecv(tensor, group=group, group_src=(rank - half) % n).wait()
            reach = half
        """,
    ],
    "reduce": [
        {"torch.empty_like(tensor)": "tensor.clone()"},
        {"    if rank == root:": "    if dist.get_rank() == dst:"},
        # a backup of the tensor, added in place, restored (2·S)
        """
        import math
        from scratch_ddp.collectives import send_recv

        rank, n = dist.get_rank(group), dist.get_world_size(group)
        root = dist.get_group_rank(group or dist.group.WORLD, dst)
        place, reach, backup = (rank - root) % n, 1, None
        while reach < n:
            if place % (2 * reach) == reach:
                dist.send(tensor, group=group, group_dst=(place - reach + root) % n)
                break
            if place + reach < n:
                if backup is None and place:
                    backup = tensor.clone()
                arriving = torch.empty_like(tensor)
                dist.recv(arriving, group=group, group_src=(place + reach + root) % n)
                tensor.add_(arriving)
                del arriving
            reach *= 2
        if backup is not None:
            tensor.copy_(backup)
        """,
        # by halves, recursively; one buffer for all rounds
        """
        import math
        from scratch_ddp.collectives import send_recv

        rank, n = dist.get_rank(group), dist.get_world_size(group)
        root = dist.get_group_rank(group or dist.group.WORLD, dst)
        place = (rank - root) % n
        total, arriving = None, None

        def collect(low, high):
            nonlocal total, arriving
            if high - low < 2:
                return
            middle = (low + high + 1) // 2
            if place < middle:
                collect(low, middle)
            else:
                collect(middle, high)
            if place == middle:
                dist.send(tensor if total is None else total, group=group, group_dst=(low + root) % n)
            elif place == low:
                if total is None:
                    total, arriving = tensor.clone(), torch.empty_like(tensor)
                dist.recv(arriving, group=group, group_src=(middle + root) % n)
                total.add_(arriving)

        collect(0, n)
        if place == 0 and total is not None:
            tensor.copy_(total)
        """,
        # own copy first, one buffer
        """
        rank, n = dist.get_rank(group), dist.get_world_size(group)
        root = dist.get_group_rank(group or dist.group.WORLD, dst)
        # In each round half of those that hold a sum send it on and are done.
        place = (rank - root) % n  # dst stands at place 0
        total, arriving = tensor.clone(), torch.empty_like(tensor)
        reach = 1  # places that are multiples of reach hold the sum of the reach places from theirs on
        while reach < n and place % reach == 0:
            if place % (2 * reach) == reach:
                dist.send(total, group=group, group_dst=(rank - reach) % n)
            elif place + reach < n:
                dist.recv(arriving, group=group, group_src=(rank + reach) % n)
                total += arriving  # not into `tensor`: it belongs to the caller
            reach *= 2
        if rank == root:
            tensor.copy_(total)
        """,
    ],
    "ring_all_reduce": [
        {"torch.empty_like(chunks[0])": "chunks[0].clone()"},
        {
            "        mine += buffer[: mine.numel()]": "        mine.add_(buffer[: mine.numel()])\n"
            "        buffer = torch.empty_like(chunks[0])"
        },
        {
            "    for step in range(n - 1):  # reduce": "    def send_recv(leaving, dst, arriving, src, group):\n"
            "        calls = [dist.P2POp(dist.isend, leaving, group=group, group_peer=dst)]\n"
            "        calls.append(dist.P2POp(dist.irecv, arriving, group=group, group_peer=src))\n"
            "        for work in dist.batch_isend_irecv(calls):\n"
            "            work.wait()\n\n"
            "    for step in range(n - 1):  # reduce"
        },
        # leftwards; one buffer for all steps; slices by hand
        """
        import math
        from scratch_ddp.collectives import send_recv

        rank, n = dist.get_rank(group), dist.get_world_size(group)
        flat, total = tensor.view(-1), tensor.numel()
        bounds = [c * total // n for c in range(n + 1)]
        part = lambda c: flat[bounds[c % n] : bounds[c % n + 1]]
        buffer = flat.new_empty(-(-total // n))
        left, right = (rank - 1) % n, (rank + 1) % n
        for step in range(1, n):
            into = part(rank + step + 1)
            arriving = buffer[: len(into)]
            send_recv(part(rank + step), left, arriving, right, group)
            into.add_(arriving)
        for step in range(n - 1):
            send_recv(part(rank + step), left, part(rank + step + 1), right, group)
        return tensor
        """,
        # chunks of ⌈S/n⌉ from the front (the last may be shorter or empty)
        """
        import os
        import sys
        import math
        from torch import Tensor
        from math import ceil, log2
        from scratch_ddp.collectives import send_recv

        rank, n = dist.get_rank(group), dist.get_world_size(group)
        flat = tensor.view(-1)
        size = -(-flat.numel() // n)
        chunks = [flat[c * size : (c + 1) * size] for c in range(n)]
        for s in range(n - 1):
            arriving = torch.empty_like(chunks[(rank - s - 1) % n])
            send_recv(chunks[(rank - s) % n], (rank + 1) % n, arriving, (rank - 1) % n, group)
            chunks[(rank - s - 1) % n] += arriving
        for s in range(n - 1):
            send_recv(chunks[(rank + 1 - s) % n], (rank + 1) % n, chunks[(rank - s) % n], (rank - 1) % n, group)
        return tensor
        """,
        # each rank collects its own chunk from all, then gives it to all
        """
        import os
        import sys
        import math
        from torch import Tensor
        from math import ceil, log2
        from scratch_ddp.collectives import send_recv

        rank, n = dist.get_rank(group), dist.get_world_size(group)
        chunks = tensor.view(-1).tensor_split(n)
        mine = chunks[rank]
        arriving = torch.empty_like(mine)
        for s in range(1, n):
            send_recv(chunks[(rank + s) % n], (rank + s) % n, arriving, (rank - s) % n, group)
            mine += arriving
        for s in range(1, n):
            send_recv(mine, (rank + s) % n, chunks[(rank - s) % n], (rank - s) % n, group)
        return tensor
        """,
    ],
}
