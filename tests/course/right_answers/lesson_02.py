"""Other right answers to the exercises of lesson 02."""

RIGHT_ANSWERS = {
    "reduce": [
        # by halves, recursively; one buffer for all rounds
        """
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
    ],
    "ring_all_reduce": [
        # each rank collects its own chunk from all, then gives it to all
        """
        chunks = tensor.view(-1).tensor_split(n)
        mine = chunks[rank]
        arriving = torch.empty_like(mine)
        for s in range(1, n):
            send_recv(chunks[(rank + s) % n], (rank + s) % n, arriving, (rank - s) % n, group)
            mine += arriving
        for s in range(1, n):
            send_recv(mine, (rank + s) % n, chunks[(rank - s) % n], (rank - s) % n, group)
        """,
    ],
}
