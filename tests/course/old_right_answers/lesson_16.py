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
}
