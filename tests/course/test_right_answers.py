"""Unusual answers that are right must pass: each is an edit of the reference, or another body."""

import pytest

from scratch_ddp.course.exercise import all_exercises
from tests.course.answers import examined, on_ranks
from tests.course.wrong_answer import edited, rewritten

EDITS = {
    "print_together": [{"len(set(texts)) > 1": "any(other != texts[0] for other in texts)"}],
    "get": [{"(dist.get_rank(group) + 1) % dist.get_world_size(group)": "(get('rank', dm) + 1) % get('ws', dm)"}],
    "all_gather_uneven": [
        {"tensor.new_zeros(longest)": "tensor.new_full((longest,), float('nan'))"},
        {"for rank in range(world_size)]\n": "for rank in range(dist.get_world_size())]\n"},
    ],
    "tree_broadcast": [
        {"dist.send(": "dist.isend(", "group_dst=(rank + reach) % n)": "group_dst=(rank + reach) % n).wait()"},
        {
            "group=group, group_dst=(rank + reach) % n": "members[(rank + reach) % n], group",
            "group=group, group_src=(rank - reach) % n": "members[(rank - reach) % n], group",
            "    reach = 1": "    members = dist.get_process_group_ranks(group)\n    reach = 1",
        },
    ],
    "reduce": [
        {"torch.empty_like(tensor)": "tensor.clone()"},
        {"    if rank == root:": "    if dist.get_rank() == dst:"},
    ],
    "ring_all_reduce": [
        {"torch.empty_like(chunks[0])": "chunks[0].clone()"},
        {
            "        mine += buffer[: mine.numel()]": "        mine.add_(buffer[: mine.numel()])\n"
            "        buffer = torch.empty_like(chunks[0])"
        },
        {
            "    for step in range(n - 1):  # reduce": "    def send_recv(leaving, dst, arriving, src, group):\n"
            "        calls = [dist.P2POp(dist.isend, leaving, group=group, group_peer=dst)]\n"
            "        calls.append(dist.P2POp(dist.irecv, arriving, group=group, group_peer=src))\n"
            "        for work in dist.batch_isend_irecv(calls):\n"
            "            work.wait()\n\n"
            "    for step in range(n - 1):  # reduce"
        },
    ],
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
        {"ring[(i + 1) % n]": "ring[i - 1]"},  # as many edges lead into a host as out of it
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
        {"sqrt(2 * save * between_failures)": "sqrt(2 * save * between_failures) - save"},  # from one save's begin
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
    "average_gradients": [
        {"parameter.grad /= dist.get_world_size()": "parameter.grad.div_(dist.get_world_size())"},
        {"parameter.grad /= dist.get_world_size()": "parameter.grad = parameter.grad / dist.get_world_size()"},
        {"model.parameters():\n": "reversed(list(model.parameters())):\n"},
        {
            "parameter.grad /= dist.get_world_size()": "parameter.grad.mul_(1 / dist.get_world_size())",
            "dist.all_reduce(parameter.grad)": "dist.all_reduce(parameter.grad, async_op=True).wait()",
        },
    ],
    "average_unequal": [
        {"parameter.grad *= items / total.item()": "parameter.grad *= items / total"},
        {"parameter.grad *= items / total.item()": "parameter.grad = parameter.grad * (items / total.item())"},
        {"    for parameter in": "    total = total.double()\n    for parameter in"},
        {"torch.zeros_like(parameter)": "parameter.detach().clone().zero_()"},
    ],
    "same_on_all_ranks": [
        {
            "all(torch.equal(mine, other) for": "1 == len({tuple(other.tolist()) for",
            "other in everyones)": "other in everyones})",
        },
        {"[*model.parameters(), *model.buffers()]": "[*model.buffers(), *model.parameters()]"},
        {
            "torch.tensor(list(digest.digest()), dtype=torch.uint8, device=tensor.device)": "torch.frombuffer("
            "bytearray(digest.digest()), dtype=torch.int64)"
        },
        {
            "list(digest.digest())": "list(digest.digest()[:8])",
            "torch.equal(mine, other)": "bytes(other.tolist()) == digest.digest()[:8]",
        },
        {"digest.update(": "digest.update(str(tensor.shape).encode()), digest.update("},
    ],
    "accuracy_once": [
        {"return right.item() / items": "return (right / items).item()"},
        {"hits[places < items].sum()": "(hits & (places < items)).count_nonzero()"},
        {"hits[places < items].sum()": "hits[: (items - rank + n - 1) // n].sum()"},
        {"hits[places < items].sum()": "torch.tensor(sum(hits[places < items].tolist()))"},
    ],
    "token_mean": [
        {"losses[counts].sum() * n / tokens": "torch.where(counts, losses, 0).sum() / tokens * n"},
        {"losses[counts].sum() * n / tokens": "losses.masked_fill(~counts, 0).sum() * (n / tokens.item())"},
        {"losses[counts].sum() * n / tokens": "losses.masked_select(counts).sum() / (tokens / n)"},
        {"tokens = counts.sum()": "tokens = counts.sum().float()"},
    ],
    "average_when_ready": [
        {
            "parameter.grad /= dist": "parameter.grad = parameter.grad / dist",
            "works.append(dist.all_reduce(parameter.grad, async_op=True))": (
                "sent = parameter.grad.contiguous()\n"
                "        works.append((dist.all_reduce(sent, async_op=True), sent, parameter))"
            ),
            "for work in works:\n            work.wait()": (
                "for work, sent, parameter in works:\n            work.wait()\n            parameter.grad.copy_(sent)"
            ),
        },
        {
            "for work in works:\n            work.wait()\n        works.clear()": (
                "while works:\n            works.pop().wait()"
            ),
        },
        {"work.wait()": "work.get_future().wait()"},
        {
            "(parameter.grad, async_op=True))": "(parameter.grad, async_op=True).get_future())",
        },
    ],
    "exposed_time": [{"exposed = 0.0": "exposed = 0"}],
    "average_through_buffer": [
        {
            "parameter.grad = view": "parameter.grad = parameter.grad if parameter.grad is view else view",
        }
    ],
    "reduce_to_owners": [{"parameter.grad /= n": "parameter.grad.mul_(1 / n)"}],
    "shift": [
        {
            "        sending = dist.isend(mine, group=group, group_dst=(rank + step) % n)\n": (
                "        send = dist.P2POp(dist.isend, mine, group=group, group_peer=(rank + step) % n)\n"
            ),
            "dist.recv(arriving, group=group, group_src=(rank - step) % n)": (
                "receive = dist.P2POp(dist.irecv, arriving, group=group, group_peer=(rank - step) % n)"
            ),
            "sending.wait()": "[work.wait() for work in dist.batch_isend_irecv([receive, send])]",
        }
    ],
    "one_f_one_b": [
        {'row.append(Action("F", r, ahead + i))': 'row.append(("F", r, ahead + i))', "row += [": "row[:] = ["}
    ],
    "forwards_ahead": [{"1 + ceil(2 * hop": "ceil((forward + backward + 2 * hop)"}],
    "bytes_of_rank": [
        {"shared = (0, 12, 14, 16)[stage]": "shared = {0: 0, 1: 12, 2: 14, 3: 16}[stage]"},
        {
            'parameters = blocks * model["parameters"] // tp': 'parameters = model["parameters"] // tp * blocks',
            "states = (16 - shared) * parameters + shared * parameters // dp": (
                "states = sum(each * parameters // (dp if stage >= level else 1) "
                "for each, level in ((2, 3), (2, 2), (4, 1), (8, 1)))"
            ),
        },
        {'blocks = model["blocks"] // pp': 'blocks, rest = divmod(model["blocks"], pp)'},
        {"shared * parameters // dp": "parameters // dp * shared"},
        {"return states + activations": "return sum([states, activations])"},
    ],
    "devices_needed": [
        {"-(-shared // room)": "(shared + room - 1) // room"},
        {"max(1, -(-shared // room)) if shared else 1": "shared // room + bool(shared % room) if shared else 1"},
        {
            "-(-shared // room)": "__import__('math').ceil(__import__('fractions').Fraction(shared, room))",
        },
        {
            "    if room < 0 or (room == 0 and shared):": "    if room == 0 and shared:\n        return None\n"
            "    if room < 0:"
        },
        {"(0, 12, 14, 16)[stage] * parameters": "sum((0, 12, 2, 2)[: stage + 1]) * parameters"},
    ],
    "smallest_batch": [
        {"ceil(seconds * flops / (2 * weights))": "int(-(-seconds * flops // (2 * weights)))"},
        {"2 * weights * (n - 1) / n": "(n - 1) * (2 * weights / n)"},
        {"ceil(seconds * flops / (2 * weights))": "ceil(seconds / (2 * weights / flops))"},
        {
            "    sent = 2 * weights * (n - 1) / n\n": "    from fractions import Fraction as F\n"
            "    sent = F(2 * weights * (n - 1), n)\n",
            "alpha + sent / bandwidth": "F(alpha) + sent / F(bandwidth)",
            "seconds * flops": "seconds * F(flops)",
        },
        {"return ceil(seconds * flops / (2 * weights))": "return max(0, ceil(flops * seconds / weights / 2))"},
    ],
    "choose_layout": [
        {"if took < seconds": "if took <= seconds"},
        {"if took < seconds": "if took < 0.97 * seconds"},
        {
            "(False, True)": "(True, False)",
            '("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")': '("ZeRO-3", "ZeRO-2", "ZeRO-1", "DDP")',
        },
        {"for pp in range(1, shape.blocks + 1)": "for pp in reversed(range(1, min(shape.blocks, devices) + 1))"},
        {
            '                    if stage == "ZeRO-3" and pp > 1:\n                        continue\n'
            "                    layout = Layout(dp, tp, pp, 1, batch // dp, stage, again)\n": (
                "                    try:\n"
                "                        layout = Layout(dp, tp, pp, 1, batch // dp, stage, again)\n"
                "                    except ValueError:\n                        continue\n"
            )
        },
    ],
    "bytes_held": [
        {"return 4 * (weights + gradients + state)": "return sum(4 * part for part in (weights, gradients, state))"}
    ],
    "f_and_g": [
        {
            "return x.view_as(x)": "return x.clone()",
            "            return gradient\n": "            return gradient.clone()\n",
        },
        {"return F.apply, G.apply": "return lambda x: F.apply(x), lambda y: G.apply(y)"},
    ],
    "sliced_cross_entropy": [
        {
            "exps = (logits - largest[:, None]).exp()": "exps = torch.exp(logits - largest.unsqueeze(1))",
            "dist.all_reduce(terms, group=group)": "dist.all_reduce(terms, dist.ReduceOp.SUM, group)",
        },
    ],
    "split_step": [
        {"parts = [0.0, 0.0, 0.0, 0.0]": "parts = [0, 0, 0, 0]"},
        {
            "moments = {start, end, *(at for each in [*computing, *mine] for at in each)}": (
                "moments = {start, end}\n    for each in [*computing, *mine]:\n        moments.update(each)"
            )
        },
        {
            "since <= a and b <= until for": "since <= (a + b) / 2 < until for",
            "since <= a and b <= ended for": "since < b and a < ended and since <= a for",
        },
        {"max(called for called, _ in same)": "sorted(same)[-1][0]"},
    ],
    "find_straggler": [
        {"torch.empty_like(called) for": "torch.zeros_like(called) for"},
        {"sum(last - at for at in same)": "last * len(same) - sum(same)"},
        {"each.tolist() for each in everyones": "(each - everyones[0].min()).tolist() for each in everyones"}
        | {"    waited_for = [0]": "    if not len(called):\n        return None\n    waited_for = [0]"},
        {
            "dist.all_gather(everyones, called, group=group)": (
                "dist.all_gather(everyones, called, group=group, async_op=True).wait()"
            )
        },
    ],
    "sync_batch_norm": [
        {
            "        exact = x.double()": "        shift = per_feature(norm.running_mean.detach().clone())\n"
            "        exact = x.double() - shift",
            "mean = total[:features] / count": "mean = total[:features] / count",
            "variance = (total[features:-1] / count - mean.square()).clamp(min=0)": (
                "variance = (total[features:-1] / count - mean.square()).clamp(min=0)\n"
                "        mean = mean + shift.flatten()"
            ),
        },
        {
            "    mean, scale = mean.to(x.dtype), scale.to(x.dtype)\n": "",
            "return (x - per_feature(mean)) * per_feature(scale * norm.weight) + per_feature(norm.bias)": (
                "y = (x - per_feature(mean)) * per_feature(scale * norm.weight) + per_feature(norm.bias)\n"
                "    return y.to(x.dtype)"
            ),
        },
        {"exact.square().sum(others), count]": "(exact * exact).sum(others), count]"},
        {"running.lerp_(value.to(running.dtype), share)": "running.copy_((1 - share) * running + share * value)"},
    ],
}
BODIES = {
    "split_step": """
        def cut(pieces, holes):
            for low, high in holes:
                pieces = [(a, b) for x, y in pieces for a, b in ((x, min(y, low)), (max(x, high), y)) if a < b]
            return pieces

        def seconds(pieces):
            return sum((b - a for a, b in pieces), 0.0)

        left, parts = [step], []
        ready = [max(each[k][0] for each in calls) for k in range(len(calls[rank]))]
        for intervals in (
            computing,
            [(since, ended) for since, (_, ended) in zip(ready, calls[rank], strict=True)],
            calls[rank],
        ):
            parts.append(seconds(left) - seconds(cut(left, intervals)))
            left = cut(left, intervals)
        computed, transfer, waiting = parts
        return [computed, waiting, transfer, seconds(left)]
    """,
    "find_straggler": """
        n = dist.get_world_size(group)
        table = torch.zeros(n, len(called), dtype=called.dtype, device=called.device)
        dist.all_gather(list(table.unbind()), called, group=group)
        late = table.amax(dim=0) - table
        first = [next(r for r in range(n) if late[r, k] == 0) for k in range(len(called))]
        cost = [sum(int(late[:, k].sum()) for k in range(len(called)) if first[k] == r) for r in range(n)]
        return max(range(n), key=cost.__getitem__) if any(cost) else None
    """,
    "sync_batch_norm": """
        def add_up(*tensors):
            total = torch.cat([each.reshape(-1) for each in tensors]).double()
            dist.all_reduce(total, group=group)
            return total

        class Norm(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight, bias):
                exact = x.double()
                rows = exact.new_tensor([x.numel() // features])
                total = add_up(rows, exact.sum(others), (exact**2).sum(others))
                ctx.count, mean = total[0], total[1 : features + 1] / total[0]
                variance = total[features + 1 :] / ctx.count - mean**2
                keep, unbiased = 1 - norm.momentum, variance * ctx.count / (ctx.count - 1)
                norm.running_mean.mul_(keep).add_(norm.momentum * mean)
                norm.running_var.mul_(keep).add_(norm.momentum * unbiased)
                norm.num_batches_tracked.add_(1)
                ctx.scale = (variance + norm.eps).rsqrt()
                normed = (exact - per_feature(mean)) * per_feature(ctx.scale)
                ctx.save_for_backward(normed, weight)
                return (normed * per_feature(weight) + per_feature(bias)).to(x.dtype)

            @staticmethod
            def backward(ctx, gradient):
                normed, weight = ctx.saved_tensors
                ones, twos = gradient.double().sum(others), (gradient * normed).sum(others)
                means = add_up(ones, twos) / ctx.count
                inner = gradient - per_feature(means[:features]) - normed * per_feature(means[features:])
                x_grad = inner * per_feature(ctx.scale * weight)
                return x_grad.to(gradient.dtype), twos.to(weight.dtype), ones.to(weight.dtype)

        if norm.training:
            return Norm.apply(x, norm.weight, norm.bias)
        return norm(x)
    """,
    "f_and_g": """
        def add_up(tensor):
            total = tensor.detach() + 0
            dist.all_reduce(total, group=group)
            return total

        class G(torch.autograd.Function):
            @staticmethod
            def forward(ctx, y):
                return add_up(y)

            @staticmethod
            def backward(ctx, gradient):
                return gradient

        def f(x):
            out = 1 * x
            if out.requires_grad:
                out.register_hook(add_up)
            return out

        return f, G.apply
    """,
    "sliced_cross_entropy": """
        first = columns * dist.get_rank(group)
        largest, _ = logits.max(dim=1, keepdim=True)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        hit = torch.arange(first, first + columns, device=logits.device) == targets[:, None]
        terms = torch.stack([(logits - largest).exp().sum(1), torch.where(hit, logits - largest, 0).sum(1)], dim=1)
        dist.all_reduce(terms, group=group)
        total, target = terms.unbind(1)
        gradient = ((logits - largest).exp() / total[:, None] - hit.to(logits.dtype)) / tokens
        return [(total.log() - target).sum() / tokens, gradient]
    """,
    "all_reduce_in_two_steps": """
        total = tensor.clone()
        dist.reduce(total, dst=root)
        dist.broadcast(total, src=root)
        tensor.copy_(total)
    """,
    "train_epoch": """
        windows = [batches[start : start + n] for start in range(0, len(batches), n)]
        for window in windows:
            optimizer.zero_grad()
            for inputs, targets in window[:-1]:
                with model.no_sync():
                    (mse_loss(model(inputs), targets) / len(window)).backward()
            inputs, targets = window[-1]
            (mse_loss(model(inputs), targets) / len(window)).backward()
            model.sync_gradients()
            optimizer.step()
        optimizer.zero_grad()
    """,
    "send_rows": """
        n, columns = dist.get_world_size(group), rows.shape[1]
        leaving = torch.tensor(counts, device=rows.device) * columns
        arriving = torch.zeros(n, dtype=leaving.dtype, device=rows.device)
        dist.all_to_all_single(arriving, leaving, [1] * n, [1] * n, group=group)
        flat = torch.zeros(int(arriving.sum()), dtype=rows.dtype, device=rows.device)
        dist.all_to_all_single(flat, rows.reshape(-1), arriving.tolist(), leaving.tolist(), group=group)
        return flat.reshape(-1, columns)
    """,
    "zero_bubble": """
        rows = []
        for r in range(p):
            left = {kind: list(range(m)) for kind in "FIW"}
            row = [Action("F", r, left["F"].pop(0)) for _ in range(min(p - 1 - r, m))]
            while left["W"]:
                for kind in "FI":
                    if left[kind]:
                        row.append(Action(kind, r, left[kind].pop(0)))
                if m - len(left["I"]) > r or not left["I"]:
                    row.append(Action("W", r, left["W"].pop(0)))
            rows.append(row)
        return rows
    """,
    "who_is_stuck": """
        done, waiting = set(), {r: list(row) for r, row in enumerate(rows)}
        for _ in range(sum(map(len, rows))):
            for r in [r for r in waiting if waiting[r]]:
                kind, stage, i = waiting[r][0]
                needs = [("F", stage - 1, i)] if kind == "F" else [("F", stage, i), ("B", stage + 1, i)]
                if all(each in done or not 0 <= each[1] <= last for each in needs):
                    done.add((kind, stage, i))
                    del waiting[r][0]
        return sorted(r for r in waiting if waiting[r])
    """,
    "time_calls": """
        operation()
        times = []
        for _ in range(repeats):
            dist.barrier()
            began = clock()
            operation()
            times.append(clock() - began)
        everyones = torch.tensor(times, dtype=torch.float64).to(device)
        dist.all_reduce(everyones, op=dist.ReduceOp.MAX)
        times = everyones.cpu().tolist()
    """,
    "no_sync": """
        with contextlib.ExitStack() as stack:
            stack.callback(setattr, model, "do_sync", model.do_sync)
            model.do_sync = False
            yield
    """,
    "forecast_step": """
        sizes = sorted(timed)
        beta = (timed[sizes[1]] - timed[sizes[0]]) / (sizes[1] - sizes[0])
        alpha = timed[sizes[0]] - beta * sizes[0]
        seconds = 0.0
        for size in gradients:
            seconds += alpha + beta * size * 2 * (n - 1) / n
    """,
}
RANKS = {"hierarchical_all_reduce": 4}  # 3 of them are on one host, or each on a host of its own
EXERCISES = all_exercises()
CASES = [(name, edited(EXERCISES[name].reference, edits)) for name, variants in EDITS.items() for edits in variants]
CASES += [(name, rewritten(EXERCISES[name].reference, body)) for name, body in BODIES.items()]


@pytest.mark.parametrize(("name", "definition"), CASES, ids=[name for name, _ in CASES])
def test_an_unusual_answer_that_is_right_passes(name, definition):
    verdict = on_ranks(RANKS.get(name, 3), examined, EXERCISES[name].cell(definition), name)
    assert verdict.passed, verdict.lines
