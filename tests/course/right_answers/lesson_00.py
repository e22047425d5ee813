"""Other right answers to the exercises of lesson 00."""

RIGHT_ANSWERS = {
    "print_together": [
        # rank 0's text goes to all, a vote decides
        """
        box = [text]
        dist.broadcast_object_list(box, src=0)
        agreed = torch.tensor([int(box[0] == text)])
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
        if not agreed.item():
            print(f"rank {rank}:", text)
        elif rank == 0:
            print(text)
        """,
    ],
    "get": [
        # a table of functions
        """
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
    ],
}
