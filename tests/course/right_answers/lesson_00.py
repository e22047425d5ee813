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
}
