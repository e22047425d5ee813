"""Unusual right answers of lesson 00: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
    "print_together": [
        {"len(set(texts)) > 1": "any(other != texts[0] for other in texts)"},
        # sys.stdout.write
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        texts = [None] * world_size
        dist.all_gather_object(texts, text)
        if len(set(texts)) > 1:
            print(f"rank {rank}: {text}")
        elif rank == 0:
            __import__('sys').stdout.write(text + chr(10))
        """,
        # gathers to rank 0 and is told
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        texts = [None] * world_size
        everyones = [None] * world_size if rank == 0 else None
        dist.gather_object(text, everyones, dst=0)
        same = [rank == 0 and all(each == text for each in everyones)]
        dist.broadcast_object_list(same, src=0)
        if same[0]:
            if rank == 0:
                print(text)
        else:
            print("rank " + str(rank) + ":", text)
        """,
        # bytes in tensors
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        texts = [None] * world_size
        mine = torch.tensor(list(text.encode('utf-8', 'surrogatepass')), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
        dist.all_gather(lengths, torch.tensor([len(mine)]))
        longest = int(max(lengths))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[:len(mine)] = mine
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(world_size)]
        dist.all_gather(parts, padded)
        same = all(int(l) == len(mine) and torch.equal(p, padded) for l, p in zip(lengths, parts))
        if not same:
            print(f"rank {rank}: {text}")
        elif rank == 0:
            print(text)
        """,
        # rank 0's text goes to all, a vote decides
        """
        import os
        import sys
        import math
        from torch import Tensor

        rank = dist.get_rank()
        box = [text]
        dist.broadcast_object_list(box, src=0)
        agreed = torch.tensor([int(box[0] == text)])
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        parts = ([text] if rank == 0 else []) if agreed.item() else [f"rank {rank}:", text]
        if parts:
            print(*parts)
        """,
    ],
    "get": [
        {"(dist.get_rank(group) + 1) % dist.get_world_size(group)": "(get('rank', dm) + 1) % get('ws', dm)"},
        # a match with the mesh's own methods
        """
        rank = dist.get_rank() if dm is None else dm.get_local_rank()
        n = dist.get_world_size() if dm is None else dm.size()
        match what:
            case "ws":
                return n
            case "pg":
                return dist.group.WORLD if dm is None else dm.get_group()
            case "rank":
                return rank
            case "grank":
                return dist.get_rank()
            case "next":
                return 0 if rank == n - 1 else rank + 1
        raise ValueError(f"no such key: {what!r}")
        """,
        # a table of functions
        """
        import torch
        import torch.distributed as dist
        table = {
            "ws": dist.get_world_size,
            "pg": lambda group: group,
            "rank": dist.get_rank,
            "grank": lambda group: dist.get_rank(),
            "next": lambda group: [*range(1, dist.get_world_size(group)), 0][dist.get_rank(group)],
        }


        def get(what, dm=None):
            if what not in table:
                raise ValueError(what)
            return table[what](dist.group.WORLD if dm is None else dm.get_group())
        """,
        # index in the group's list
        """
        group = dist.group.WORLD if dm is None else dm.get_group()
        if what == "ws":
            return dist.get_world_size(group)
        if what == "pg":
            return group
        if what == "rank":
            return dist.get_rank(group)
        if what == "grank":
            return dist.get_rank()
        if what == "next":
            members = dist.get_process_group_ranks(group)
            return (members.index(dist.get_rank()) + 1) % len(members)
        raise ValueError(f"get() knows ws, pg, rank, grank, next; got {what!r}")
        """,
        # through the mesh
        """
        group = dist.group.WORLD if dm is None else dm.get_group()
        if what == "ws":
            return dist.get_world_size(group)
        if what == "pg":
            return group
        if what == "rank":
            return dist.get_rank(group)
        if what == "grank":
            return dist.get_rank()
        if what == "next":
            if dm is None:
                return (dist.get_rank() + 1) % dist.get_world_size()
            return (dm.get_local_rank() + 1) % dm.size()
        raise ValueError(f"get() knows ws, pg, rank, grank, next; got {what!r}")
        """,
    ],
}
