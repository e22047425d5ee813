"""Unusual right answers of lesson 10: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
    "sharded_step": [
        # with the page's own functions
        """
        import torch
        import torch.distributed as dist


        def gather(shard):
            gathered = shard.new_empty(dist.get_world_size() * len(shard), shard.shape[1])
            dist.all_gather(list(gathered.split(len(shard))), shard)
            return gathered


        def reduce_scatter(gradient):
            rows = gradient.new_empty(len(gradient) // dist.get_world_size(), gradient.shape[1])
            dist.reduce_scatter(rows, list(gradient.split(len(rows))))
            return rows


        def sharded_step(shards, inputs, targets, lr):
            kept = [inputs]
            for shard in shards:
                outputs = kept[-1] @ gather(shard).T
                kept.append(outputs.relu())
            delta = outputs - targets
            for shard, below in zip(reversed(shards), reversed(kept[:-1]), strict=True):
                whole = gather(shard)
                handed_down = delta @ whole
                del whole
                shard -= lr * reduce_scatter(delta.T @ below)
                delta = handed_down * below.sign()
        """,
        # into_tensor calls
        """
        n = dist.get_world_size()

        def gather(shard):
            whole = shard.new_empty(n * len(shard), shard.shape[1])
            dist.all_gather_into_tensor(whole, shard)
            return whole

        kept = [inputs]
        for shard in shards:
            outputs = kept[-1] @ gather(shard).T  # the whole weight has no name, so the line's end frees it
            kept.append(outputs.relu())
        delta = outputs - targets
        for shard, below in zip(reversed(shards), reversed(kept[:-1]), strict=True):
            whole = gather(shard)
            handed_down = delta @ whole
            del whole
            gradient = delta.T @ below
            mine = torch.empty_like(shard)
            dist.reduce_scatter_tensor(mine, gradient)
            del gradient
            shard -= lr * mine
            delta = handed_down * below.sign()  # relu lets through what is above 0
        """,
        # recursion
        """
        n = dist.get_world_size()
        def gather(shard):
            out = torch.empty((n * shard.shape[0], *shard.shape[1:]), dtype=shard.dtype, device=shard.device)
            dist.all_gather(list(out.chunk(n)), shard)
            return out
        def layer(k, x):
            \"\"\"returns gradient for x\"\"\"
            s = shards[k]
            y = x @ gather(s).T
            if k + 1 == len(shards):
                d = y - targets
            else:
                h = y.clamp(min=0)
                del y
                d = layer(k + 1, h)
                d = torch.where(h > 0, d, 0.0)
            down = d @ gather(s)
            G = d.T @ x
            g = torch.empty_like(s)
            dist.reduce_scatter(g, list(G.chunk(n)))
            s.sub_(g, alpha=lr)
            return down
        layer(0, inputs)
        """,
        # waits asynchronously
        """
        n = dist.get_world_size()

        def gather(shard):
            whole = shard.new_empty(n * len(shard), shard.shape[1])
            dist.all_gather(list(whole.split(len(shard))), shard, async_op=True).wait()
            return whole

        kept = [inputs]
        for shard in shards:
            outputs = kept[-1] @ gather(shard).T  # the whole weight has no name, so the line's end frees it
            kept.append(outputs.relu())
        delta = outputs - targets
        for shard, below in zip(reversed(shards), reversed(kept[:-1]), strict=True):
            whole = gather(shard)
            handed_down = delta @ whole
            del whole
            gradient = delta.T @ below
            mine = torch.empty_like(shard)
            dist.reduce_scatter(mine, list(gradient.split(len(shard))))
            del gradient
            shard -= lr * mine
            delta = handed_down * below.sign()  # relu lets through what is above 0
        """,
        # all_gather_into_tensor and reduce_scatter_tensor; the matrix' memory is used again for the gradient
        """
        import torch
        import torch.distributed as dist

        def gather(shard):
            world_size = dist.get_world_size()
            gathered = shard.new_empty(world_size * len(shard), shard.shape[1])
            dist.all_gather(list(gathered.split(len(shard))), shard)
            return gathered


        def reduce_scatter(gradient):
            world_size = dist.get_world_size()
            rows = gradient.new_empty(len(gradient) // world_size, gradient.shape[1])
            dist.reduce_scatter(rows, list(gradient.split(len(rows))))
            return rows


        def sharded_step(shards, inputs, targets, lr):
            rank, world_size = dist.get_rank(), dist.get_world_size()

            hs = [inputs]
            for i, shard in enumerate(shards):
                W = shard.new_empty(world_size * len(shard), shard.shape[1])
                dist.all_gather_into_tensor(W, shard)
                h = hs[-1] @ W.T
                hs.append(h.clamp(min=0) if i < len(shards) - 1 else h)
                del W, h
            d = hs.pop() - targets
            while hs:
                h = hs.pop()
                shard = shards[len(hs)]
                W = shard.new_empty(world_size * len(shard), shard.shape[1])
                dist.all_gather_into_tensor(W, shard)
                below = torch.where(h > 0, d @ W, 0)
                torch.mm(d.T, h, out=W)
                g = torch.empty_like(shard)
                dist.reduce_scatter_tensor(g, W)
                del W
                shard.sub_(g.mul_(lr))
                del g
                d = below
        """,
        # the base of the wrong ones
        """
        import torch
        import torch.distributed as dist

        def gather(shard):
            world_size = dist.get_world_size()
            gathered = shard.new_empty(world_size * len(shard), shard.shape[1])
            dist.all_gather(list(gathered.split(len(shard))), shard)
            return gathered


        def reduce_scatter(gradient):
            world_size = dist.get_world_size()
            rows = gradient.new_empty(len(gradient) // world_size, gradient.shape[1])
            dist.reduce_scatter(rows, list(gradient.split(len(rows))))
            return rows


        def sharded_step(shards, inputs, targets, lr):
            rank, world_size = dist.get_rank(), dist.get_world_size()
            hs = [inputs]
            for i, shard in enumerate(shards):
                W = gather(shard)
                h = hs[-1] @ W.T
                del W
                hs.append(h.relu() if i < len(shards) - 1 else h)
            d = hs.pop() - targets
            del h
            for i in reversed(range(len(shards))):
                shard = shards[i]
                h = hs.pop()
                W = gather(shard)
                below = d @ W
                del W
                G = d.T @ h
                d = below * h.sign()
                g = reduce_scatter(G)
                del G
                shard -= lr * g
        """,
    ],
    "gather_uneven": [
        # sends the shard itself if it is full
        """
        n = dist.get_world_size()
        k = -(-rows // n)
        padded = shard.new_zeros(k, shard.shape[1])
        padded[: len(shard)] = shard
        whole = shard.new_empty(n * k, shard.shape[1])
        dist.all_gather(list(whole.split(k)), shard.contiguous() if len(shard) == k else padded)
        return whole[:rows]
        """,
        # F.pad and into_tensor
        """
        n = dist.get_world_size()
        k = -(-rows // n)
        padded = torch.nn.functional.pad(shard, (0, 0, 0, k - len(shard))).contiguous()
        whole = shard.new_empty(n * k, shard.shape[1])
        dist.all_gather_into_tensor(whole, padded)
        return whole[:rows]
        """,
        # padding undefined
        """
        n = dist.get_world_size()
        k = -(-rows // n)
        padded = shard.new_empty(k, shard.shape[1])
        padded[: len(shard)] = shard
        whole = shard.new_empty(n * k, shard.shape[1])
        dist.all_gather(list(whole.split(k)), padded)
        return whole[:rows]
        """,
        # sends bytes
        """
        n = dist.get_world_size()
        k = -(-rows // n)
        padded = shard.new_zeros(k, shard.shape[1])
        padded[: len(shard)] = shard
        whole = shard.new_empty(n * k, shard.shape[1])
        dist.all_gather([p.view(torch.uint8) for p in whole.split(k)], padded.view(torch.uint8))
        return whole[:rows]
        """,
        # own rows are sent from their place in the result
        """
        import math

        rank, n = dist.get_rank(), dist.get_world_size()

        k = math.ceil(rows / n)
        whole = shard.new_empty(n * k, shard.shape[1])
        pieces = list(whole.split(k))
        pieces[rank][:len(shard)] = shard
        dist.all_gather(pieces, pieces[rank].clone())
        return whole.narrow(0, 0, rows)
        """,
    ],
}
