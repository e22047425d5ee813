from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "hierarchical_all_reduce": (
        WrongAnswer(
            "flat, over all ranks",
            fails="group",
            says="all_reduce goes through ranks [0, 1, 2, 3]",
            body="flat = tensor.contiguous()\ndist.all_reduce(flat)\ntensor.copy_(flat)",
        ),
        WrongAnswer(
            "the whole tensor between hosts",
            fails="cost",
            says="calls all_reduce",
            body="""
                flat = tensor.contiguous()
                for name in ("local", "host"):
                    dist.all_reduce(flat, group=mesh[name].get_group())
                tensor.copy_(flat)
            """,
            also=("group",),
        ),
        WrongAnswer(
            "the two dimensions have changed places",
            fails="group",
            says="should go through ranks",
            edits={'mesh["local"].get_group(), mesh["host"]': 'mesh["host"].get_group(), mesh["local"]'},
            also=("cost",),
        ),
        WrongAnswer(
            "hosts of two ranks", fails="runs", says="raised", edits={"dist.get_world_size(local), tensor": "2, tensor"}
        ),
        WrongAnswer("only what divides", fails="runs", says="raised", edits={"-(-size // n)": "size // n"}),
        WrongAnswer(
            "small tensors are left out",
            fails="value",
            says="one element",
            edits={"    parts = ": "    if size < n:\n        return\n    parts = "},
            also=("agreement",),
        ),
        WrongAnswer(
            "nothing to do on a host of one rank",
            fails="value",
            says="4 × 1 ranks",
            edits={"    parts = ": "    if n == 1:\n        return\n    parts = "},
            also=("agreement",),
        ),
        WrongAnswer(
            "no all-gather",
            fails="value",
            says="tensor is",
            edits={"dist.all_gather(list(parts), mine, group=local)": "parts[dist.get_rank(local)] = mine"},
            also=("agreement",),
        ),
        WrongAnswer(
            "every host for itself",
            fails="value",
            says="2 × 2 ranks",
            edits={"dist.all_reduce(mine, group=between)": "pass"},
            also=("agreement",),
        ),
        WrongAnswer(
            "in float32",
            fails="value",
            says="tensor is",
            edits={"tensor.new_zeros(n, -(-size // n))": "torch.zeros(n, -(-size // n), device=tensor.device)"},
            also=("cost",),
        ),
        WrongAnswer("everything is sent n times", fails="cost", says="2 × 2 ranks", edits={"-(-size // n)": "size"}),
        WrongAnswer(
            "a new tensor",
            fails="value",
            says="tensor is",
            edits={"tensor.copy_(parts": "return (parts"},
            also=("agreement",),
        ),
        WrongAnswer(
            "the tensor gets other memory",
            fails="untouched",
            says="write into it in place",
            edits={
                "tensor.copy_(parts.view(-1)[:size].view(tensor.shape))": "tensor.data = parts.view(-1)[:size].view("
                "tensor.shape)"
            },
        ),
        WrongAnswer("contiguous only", fails="runs", says="view", edits={"tensor.flatten()": "tensor.view(-1)"}),
        WrongAnswer(
            "groups of its own",
            fails="runs",
            says="makes a process group in every call",
            edits={'mesh["local"].get_group(), mesh': "dist.new_subgroups(mesh.shape[1])[0], mesh"},
        ),
        WrongAnswer(
            "over one rank of each host",
            fails="cost",
            says="calls broadcast",
            body="""
                local, between = mesh["local"].get_group(), mesh["host"].get_group()
                flat = tensor.contiguous()
                dist.reduce(flat, group=local, group_dst=0)
                if dist.get_rank(local) == 0:
                    dist.all_reduce(flat, group=between)
                dist.broadcast(flat, group=local, group_src=0)
                tensor.copy_(flat)
            """,
        ),
        WrongAnswer(
            "dimensions by their place",
            fails="group",
            says='"local" the first dimension',
            edits={'mesh["local"].get_group(), mesh["host"].get_group()': "mesh.get_group(1), mesh.get_group(0)"},
            also=("cost",),
        ),
        WrongAnswer(
            "copies the padding as well",
            fails="untouched",
            says="beside `tensor`",
            edits={
                "tensor.copy_(parts": "if tensor.is_contiguous() and size:\n"
                "        tensor.as_strided((parts.numel(),), (1,)).copy_(parts.view(-1))\n    tensor.copy_(parts"
            },
        ),
        WrongAnswer(
            "two ranks on every host, or one, or one host",
            fails="runs",
            says="elements into",
            edits={
                "dist.get_world_size(local), tensor": "min(2 if mesh['host'].size() > 1 else 9, "
                "dist.get_world_size(local)), tensor"
            },
        ),
        WrongAnswer(
            "float32 on one host",
            fails="value",
            says="1 × 4 ranks",
            edits={
                "parts = tensor.new_zeros(n, -(-size // n))": "kind = torch.float32 if mesh['host'].size() == 1 and "
                "tensor.dtype == torch.int64 else tensor.dtype\n"
                "    parts = torch.zeros(n, -(-size // n), dtype=kind, device=tensor.device)"
            },
        ),
        WrongAnswer(
            "many elements in half precision between hosts",
            fails="value",
            says="20,003 elements of float32",
            edits={
                "dist.all_reduce(mine, group=between)": "low = mine.bfloat16() if size > 300 and "
                "mine.dtype == torch.float32 else mine\n    dist.all_reduce(low, group=between)\n    mine.copy_(low)"
            },
        ),
        WrongAnswer(
            "makes the tensor require a gradient",
            fails="untouched",
            says="requires_grad",
            edits={
                "    tensor.copy_(": "    if tensor.is_floating_point():\n        tensor.requires_grad_()\n"
                "    tensor = tensor.detach()\n    tensor.copy_("
            },
        ),
        WrongAnswer(
            "adds to what is left from before",
            fails="value",
            says="again",
            edits={
                "    parts = tensor": "    function = hierarchical_all_reduce\n    parts = tensor",
                "parts.view(-1)[:size] = tensor.flatten()": "parts = vars(function).setdefault((*parts.shape, "
                "parts.dtype), parts)\n    parts.view(-1)[:size] += tensor.flatten()",
            },
            also=("untouched",),
        ),
        WrongAnswer(
            "sends large parts in pieces between the hosts",
            fails="cost",
            says="calls all_reduce 3 times, budget 1.",
            edits={
                "dist.all_reduce(mine, group=between)": (
                    "for part in mine.split(2**16) if size else [mine]:\n        dist.all_reduce(part, group=between)"
                ),
            },
        ),
    ),
    "bytes_out_of_hosts": (
        WrongAnswer("the reduce-scatter only", fails="value", says="should be", edits={"2 * (n - 1)": "(n - 1)"}),
        WrongAnswer(
            "the whole size twice", fails="value", says="should be", edits={"2 * (n - 1) * size // n": "2 * size"}
        ),
        WrongAnswer("in floats", fails="value", says="should be an int", edits={"* size // n": "* size / n"}),
        WrongAnswer(
            "in floats, cut at the end",
            fails="value",
            says="should be",
            edits={"2 * (n - 1) * size // n": "int(2 * (n - 1) / n * size)"},
        ),
        WrongAnswer(
            "inside hosts too",
            fails="value",
            says="4 ranks in blocks",
            edits={"host_of[rank] != host_of[successor]": "rank != successor"},
        ),
        WrongAnswer("an open ring", fails="value", says="should be", edits={"enumerate(ring)": "enumerate(ring[:-1])"}),
        WrongAnswer(
            "in the order of the numbers",
            fails="value",
            says="hosts alternate",
            edits={"    n = len(ring)": "    ring = sorted(ring)\n    n = len(ring)"},
        ),
        WrongAnswer(
            "the ring's hosts only",
            fails="value",
            says="2 ranks of one host",
            edits={"host_of.values()": "(host_of[rank] for rank in ring)"},
        ),
        WrongAnswer(
            "all ranks take part", fails="value", says="2 ranks on 2 hosts", edits={"size // n": "size // len(host_of)"}
        ),
        WrongAnswer("each host once", fails="value", says="should be", edits={"+= sent": "= sent"}),
        WrongAnswer(
            "all hosts together",
            fails="value",
            says="should be a dict",
            edits={"return out": "return sum(out.values())"},
        ),
        WrongAnswer(
            "by rank", fails="value", says="should be", edits={"out[host_of[rank]] += sent": "out[rank] = sent"}
        ),
        WrongAnswer(
            "closes the caller's list",
            fails="untouched",
            says="has other entries",
            edits={
                "    for i": "    ring.append(ring[0])\n    for i",
                "enumerate(ring)": "enumerate(ring[:-1])",
                "(i + 1) % n": "i + 1",
            },
        ),
        WrongAnswer(
            "clears the caller's dict",
            fails="untouched",
            says="host_of (4 ranks in blocks)",
            edits={"    return out": "    host_of.clear()\n    return out"},
        ),
        WrongAnswer("four ranks", fails="value", says="should be", edits={"2 * (n - 1) * size // n": "6 * size // 4"}),
        WrongAnswer(
            "each run of a host sends, also over the list's end",
            fails="value",
            says="the first and the last on one host",
            edits={
                "if host_of[rank] != host_of[successor]:": "if host_of[rank] != host_of[successor] or "
                "i == n - 1 and len({host_of[each] for each in ring}) > 1:"
            },
        ),
        WrongAnswer(
            "fractions",
            fails="value",
            says="is a Fraction, should be an int",
            edits={"2 * (n - 1) * size // n": "__import__('fractions').Fraction(2 * (n - 1) * size, n)"},
        ),
        WrongAnswer(
            "in 64 bits",
            fails="value",
            says="a size above 2⁶⁴",
            edits={"2 * (n - 1) * size // n": "__import__('ctypes').c_int64(2 * (n - 1) * size // n).value"},
        ),
        WrongAnswer(
            "recursion along the ring",
            fails="runs",
            says="1,010 ranks",
            edits={
                "    for i, rank in": "    def first(i):\n        return i if i == n - 1 else max(i, first(i + 1))\n"
                "\n    first(0)\n    for i, rank in"
            },
        ),
        WrongAnswer(
            "names without capitals and spaces",
            fails="value",
            says="no entry for host 'Box'",
            edits={
                "dict.fromkeys(host_of.values(), 0)": "{host.strip().lower(): 0 for host in host_of.values()}",
                "out[host_of[rank]] +=": "out[host_of[rank].strip().lower()] +=",
            },
        ),
        WrongAnswer(
            "one dict for all calls",
            fails="value",
            says="the same object in several calls",
            edits={
                "    out = dict.fromkeys(host_of.values(), 0)": "    out = bytes_out_of_hosts.__annotations__\n"
                "    out.clear()\n    out.update(dict.fromkeys(host_of.values(), 0))"
            },
        ),
    ),
}
