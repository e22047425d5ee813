"""Other right answers to the exercises of lesson 10."""

RIGHT_ANSWERS = {
    "sharded_step": [
        # recursion: a layer's backward stands behind the layers above
        """
        n = dist.get_world_size()

        def gather(shard):
            whole = torch.empty((n * shard.shape[0], shard.shape[1]), dtype=shard.dtype, device=shard.device)
            dist.all_gather(list(whole.chunk(n)), shard)
            return whole

        def layer(k, x):
            shard = shards[k]
            y = x @ gather(shard).T
            if k + 1 == len(shards):
                delta = y - targets
            else:
                delta = torch.where(y > 0, layer(k + 1, y.clamp(min=0)), 0.0)
            down = delta @ gather(shard)
            mine = torch.empty_like(shard)
            dist.reduce_scatter(mine, list((delta.T @ x).chunk(n)))
            shard.sub_(mine, alpha=lr)
            return down

        layer(0, inputs)
        """,
    ],
    "shard_unit": [
        # the old shard.grad's memory is used again
        {
            "shard.grad = torch.empty_like(shard)": (
                "shard.grad = torch.empty_like(shard) if shard.grad is None else shard.grad"
            )
        },
    ],
}
