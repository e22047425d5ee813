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
        {"dist.send(": "dist.isend(", "group_dst=(rank + reach) % n)": "group_dst=(rank + reach) % n).wait()"}
    ],
    "reduce": [{"torch.empty_like(tensor)": "tensor.clone()"}],
    "ring_all_reduce": [{"torch.empty_like(chunks[0])": "chunks[0].clone()"}],
    "average_gradients": [{"parameter.grad /= dist.get_world_size()": "parameter.grad.div_(dist.get_world_size())"}],
    "same_on_all_ranks": [
        {
            "all(torch.equal(mine, other) for": "1 == len({tuple(other.tolist()) for",
            "other in everyones)": "other in everyones})",
        }
    ],
    "accuracy_once": [{"return right.item() / items": "return (right / items).item()"}],
    "token_mean": [{"losses[counts].sum() * n / tokens": "torch.where(counts, losses, 0).sum() / tokens * n"}],
    "average_when_ready": [
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
            out.register_hook(add_up)
            return out

        return f, G.apply
    """,
    "sliced_cross_entropy": """
        first = columns * dist.get_rank(group)
        largest, _ = logits.max(dim=1, keepdim=True)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        hit = torch.arange(first, first + columns, device=logits.device) == targets[:, None]
        terms = torch.stack([(logits - largest).exp().sum(1), ((logits - largest) * hit).sum(1)], dim=1)
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
