"""Other right answers to the exercises of lesson 08."""

RIGHT_ANSWERS = {
    "average_when_ready": [
        # hooks of the nodes that add up gradients
        """
        nodes = []

        def start(parameter, *_):
            parameter.grad /= dist.get_world_size()
            works.append(dist.all_reduce(parameter.grad, async_op=True))

        for parameter in model.parameters():
            if parameter.requires_grad:
                nodes.append(parameter.view_as(parameter).grad_fn.next_functions[0][0])
                nodes[-1].register_hook(lambda *_, parameter=parameter: start(parameter))

        def finish():
            while works:
                works.pop().wait()

        finish.nodes = nodes  # a node lives as long as somebody has it
        """,
    ],
    "exposed_time": [
        # the union of both less the union of computing
        """
        def union(stretches):
            total, reached = 0.0, float("-inf")
            for a, b in sorted(stretches):
                if b > reached:
                    total += b - max(a, reached)
                    reached = b
            return total

        return union(compute + communication) - union(compute)
        """,
    ],
}
