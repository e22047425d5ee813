"""Unusual right answers of lesson 03: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
    "average_gradients": [
        {
            "dist.all_reduce(parameter.grad)": (
                "torch.futures.wait_all([dist.all_reduce(parameter.grad, async_op=True).get_future()])"
            )
        },
        {"parameter.grad /= world_size": "parameter.grad.div_(dist.get_world_size())"},
        {"parameter.grad /= world_size": "parameter.grad = parameter.grad / dist.get_world_size()"},
        {"model.parameters():\n": "reversed(list(model.parameters())):\n"},
        {
            "parameter.grad /= world_size": "parameter.grad.mul_(1 / dist.get_world_size())",
            "dist.all_reduce(parameter.grad)": "dist.all_reduce(parameter.grad, async_op=True).wait()",
        },
        # one message a dtype
        """
        import collections
        by = collections.defaultdict(list)
        n = dist.get_world_size()
        for p in model.parameters():
            if p.requires_grad:
                by[p.dtype].append(p)
        for dtype, ps in by.items():
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) / n for p in ps])
            dist.all_reduce(flat)
            for p, part in zip(ps, flat.split([p.numel() for p in ps])):
                p.grad = torch.empty_like(p, requires_grad=False).copy_(part.view(p.shape))
        """,
    ],
    "average_unequal": [
        {"parameter.grad *= items / total.item()": "parameter.grad *= items / total"},
        {"parameter.grad *= items / total.item()": "parameter.grad = parameter.grad * (items / total.item())"},
        {"    for parameter in": "    total = total.double()\n    for parameter in"},
        {"torch.zeros_like(parameter)": "parameter.detach().clone().zero_()"},
        # asks for the total while it looks for missing gradients, all all-reduces asynchronous with waits
        """
        total = torch.tensor(float(items), dtype=torch.float64)
        asked = dist.all_reduce(total, async_op=True)
        parameters = list(model.parameters())
        if not items:
            for p in parameters:
                p.grad = torch.zeros_like(p)
        asked.wait()
        works = []
        for p in parameters:
            p.grad.mul_(items / total.item())
            works.append(dist.all_reduce(p.grad, async_op=True))
        for work in works:
            work.wait()
        """,
    ],
}
