"""Other right answers to the exercises of lesson 14."""

RIGHT_ANSWERS = {
    "f_and_g": [
        # f by a hook
        """
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
    ],
    "sliced_cross_entropy": [
        # a mask for the targets
        """
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
    ],
}
