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
            "parameter.grad /= dist.get_world_size()  # before": "# after",
            "works.append(dist.all_reduce(parameter.grad, async_op=True))": (
                "works.append((dist.all_reduce(parameter.grad, async_op=True), parameter))"
            ),
            "for work in works:\n            work.wait()": (
                "for work, parameter in works:\n            work.wait()\n"
                "            parameter.grad = parameter.grad / dist.get_world_size()"
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
}
BODIES = {
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
EXERCISES = all_exercises()
CASES = [(name, edited(EXERCISES[name].reference, edits)) for name, variants in EDITS.items() for edits in variants]
CASES += [(name, rewritten(EXERCISES[name].reference, body)) for name, body in BODIES.items()]


@pytest.mark.parametrize(("name", "definition"), CASES, ids=[name for name, _ in CASES])
def test_an_unusual_answer_that_is_right_passes(name, definition):
    verdict = on_ranks(3, examined, EXERCISES[name].cell(definition), name)
    assert verdict.passed, verdict.lines
