"""Unusual right answers of lesson 16: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
    "hierarchical_all_reduce": [
        {
            "dist.reduce_scatter(mine, list(parts),": "dist.reduce_scatter_tensor(mine, parts.view(-1),",
            "dist.all_gather(list(parts), mine,": "dist.all_gather_into_tensor(parts.view(-1), mine,",
        },
        {
            'mesh["local"].get_group(), mesh["host"].get_group()': 'get("pg", mesh["local"]), mesh.get_group("host")',
            "    local, between": "    from scratch_ddp import get\n\n    local, between",
        },
        {
            "dist.all_reduce(mine, group=between)": "dist.all_reduce(mine, group=between, async_op=True).wait()",
            "dist.all_gather(list(parts), mine, group=local)": "work = dist.all_gather(list(parts), mine, group=local, "
            "async_op=True)\n    work.wait()",
        },
        {
            "dist.reduce_scatter(mine": "if n == 1:\n        mine.copy_(parts[0])\n    else:\n"
            "        dist.reduce_scatter(mine",
            "    dist.all_gather(list(parts), mine, group=local)": "    if n > 1:\n"
            "        dist.all_gather(list(parts), mine, group=local)\n    else:\n        parts[0] = mine",
            "    parts = ": "    if not size:\n        return tensor\n    parts = ",
        },
        {
            "tensor.new_zeros(n, ": "tensor.new_empty(n, ",
            "torch.empty_like(parts[0])": "parts[dist.get_rank(local)].clone()",
            "tensor.copy_(": "return tensor.copy_(",
        },
        {
            "dist.get_world_size(local), tensor": 'mesh.size(mesh.mesh_dim_names.index("local")), tensor',
            'mesh["local"].get_group(), mesh["host"].get_group()': 'mesh.get_group("local"), mesh.get_group("host")',
        },
    ],
    "bytes_out_of_hosts": [
        {"dict.fromkeys(host_of.values(), 0)": "__import__('collections').Counter(dict.fromkeys(host_of.values(), 0))"},
        {"2 * (n - 1) * size // n": "2 * (n - 1) * (size // n)"},
        {"ring[(i + 1) % n]": "ring[i - 1]"},
        {"ring[(i + 1) % n]": "(ring + ring[:1])[i + 1]", "2 * (n - 1) * size // n": "2 * size - 2 * size // n"},
        {
            "    for i, rank in enumerate(ring)": "    hosts = [host_of[rank] for rank in ring]\n"
            "    pairs = list(zip(hosts, hosts[1:] + hosts[:1]))\n"
            "    return {host: sent * sum(a == host != b for a, b in pairs) for host in out}\n"
            "    for i, rank in enumerate(ring)"
        },
    ],
    "resume": [
        {"items[rank::n]": "[item for i, item in enumerate(items) if i % n == rank]"},
        {"order(epoch)[number * batch : (number + 1) * batch]": "order(epoch)[number * batch :][:batch]"},
        {'-(-saved["items"] // batch)': 'len(range(0, saved["items"], batch))'},
        {
            "    mine = []": "    orders = {}\n    mine = []",
            "order(epoch)[": "orders.setdefault(epoch, order(epoch))[",
        },
        {
            "    mine = []": "    mine = []\n"
            '    last = (saved["done"] + steps) // steps_per_epoch\n'
            "    run = [order(epoch)[i : i + batch] for epoch in range(last + 1) "
            'for i in range(0, saved["items"], batch)]\n'
            '    return [items[rank::n] for items in run[saved["done"] :][:steps]]'
        },
    ],
    "saving_interval": [
        {"sqrt(2 * save * between_failures)": "(2 * save * between_failures) ** 0.5"},
        {"sqrt(2 * save * between_failures)": "sqrt(2 * save * between_failures) - save"},
        {"days * 24 * 3600 / hosts": "86400 * days * (1 / hosts)"},
        {"return sqrt(": "import numpy as np\n\n    return np.sqrt("},
        {
            "    return ": "    def lost(t):\n        return save / t + t / 2 / between_failures\n"
            "\n    t = between_failures\n    while lost(0.99 * t) < lost(t):\n        t *= 0.99\n"
            "    return t\n    return "
        },
        {
            "    return ": "    from math import exp\n\n"
            "    def passed(t):\n"
            "        return (restart + between_failures) * (exp((t + save) / between_failures) - 1) / t\n\n"
            "    return min((between_failures * 0.97**i for i in range(400)), key=passed)\n    return "
        },
    ],
    "faulty_host": [
        {'log.split("hostname -I")[1].split()[0]': '__import__("re").search(r"hostname -I\\s+(\\S+)", log)[1]'},
        {
            "Unable to find address for": "Unable to find address",
            "did not let this host in": "Install the same versions on both",
        },
        {"Unable to find address for": "enforce fail at gloo"},
        {'f"trying to connect to ({own_address},"': 'f"127.0.1.1       {host}" in log and f"endpoint {own_address}:"'},
        {
            "    for host, log in logs.items():": "    host, other = logs\n"
            '    for text, cause in (("Unable to find", "interface"), ("let this host in", "version")):\n'
            "        if text in logs[host] or text in logs[other]:\n"
            "            return host if text in logs[host] else other, cause\n"
            "    for host, log in reversed(logs.items()):"
        },
    ],
}
