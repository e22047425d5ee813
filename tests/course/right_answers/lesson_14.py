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
}
