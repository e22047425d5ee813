"""Other right answers of lesson 16."""

RIGHT_ANSWERS = {
    "hierarchical_all_reduce": [
        {
            "dist.reduce_scatter(mine, list(parts),": "dist.reduce_scatter_tensor(mine, parts.view(-1),",
            "dist.all_gather(list(parts), mine,": "dist.all_gather_into_tensor(parts.view(-1), mine,",
        },
        {
            "dist.reduce_scatter(mine": "if n == 1:\n        mine.copy_(parts[0])\n    else:\n"
            "        dist.reduce_scatter(mine",
            "    dist.all_gather(list(parts), mine, group=local)": "    if n > 1:\n"
            "        dist.all_gather(list(parts), mine, group=local)\n    else:\n        parts[0] = mine",
        },
    ],
    "bytes_out_of_hosts": [
        {
            "    for i, rank in enumerate(ring)": "    hosts = [host_of[rank] for rank in ring]\n"
            "    pairs = list(zip(hosts, hosts[1:] + hosts[:1]))\n"
            "    return {host: sent * sum(a == host != b for a, b in pairs) for host in out}\n"
            "    for i, rank in enumerate(ring)"
        },
    ],
    "save_and_load": [
        """
        from pathlib import Path

        def save(*args):
            model, optimizer, step = args
            torch.save([model.state_dict(), optimizer.state_dict(), step], path + "~")
            Path(path + "~").rename(path)

        def load(model, optimizer):
            try:
                saved = torch.load(path, weights_only=True)
            except FileNotFoundError:
                return 0
            for each, state in zip((model, optimizer), saved):
                each.load_state_dict(state)
            return saved[2]

        return save, load
        """,
    ],
    "resume": [
        {
            "    mine = []": "    mine = []\n"
            '    last = (saved["done"] + steps) // steps_per_epoch\n'
            "    run = [order(epoch)[i : i + batch] for epoch in range(last + 1) "
            'for i in range(0, saved["items"], batch)]\n'
            '    return [items[rank::n] for items in run[saved["done"] :][:steps]]'
        },
    ],
    "saving_interval": [
        {"sqrt(2 * save * between_failures)": "(2 * save * between_failures) ** 0.5 - save"},
    ],
    "faulty_host": [
        {'f"trying to connect to ({own_address},"': 'f"127.0.1.1       {host}" in log and f"endpoint {own_address}:"'},
    ],
}
