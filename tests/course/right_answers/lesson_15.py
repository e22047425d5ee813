"""Other right answers of lesson 15."""

RIGHT_ANSWERS = {
    "bytes_of_rank": [
        {
            'parameters = blocks * model["parameters"] // tp': 'parameters = model["parameters"] // tp * blocks',
            "states = (16 - shared) * parameters + shared * parameters // dp": (
                "states = sum(each * parameters // (dp if stage >= level else 1) "
                "for each, level in ((2, 3), (2, 2), (4, 1), (8, 1)))"
            ),
        },
    ],
    "devices_needed": [
        {"max(1, -(-shared // room)) if shared else 1": "shared // room + bool(shared % room) if shared else 1"},
    ],
    "smallest_batch": [
        {"ceil(seconds * flops / (2 * weights))": "ceil(seconds / (2 * weights / flops))"},
    ],
    "step_seconds": [
        """
        tokens = layout.micro * sequence
        passes = 3 if layout.checkpointing else 2
        forward = shape.block / layout.tp * 2 * tokens / (0.55 * cluster.device.flops)
        sent = 4 * cluster.wire(layout.tp).all_gather(2 * tokens * shape.width)
        blocks = shape.blocks // layout.pp
        one = blocks * (3 * forward + passes * sent + (forward if passes == 3 else 0))
        gradients = cluster.wire(layout.dp, layout.tp * layout.pp).all_reduce(2 * blocks * shape.block / layout.tp)
        return layout.micro_batches * one + (layout.pp - 1) * one + gradients
        """,
    ],
    "choose_layout": [
        {"if seconds < least": "if seconds <= least", "(False, True)": "(True, False)"},
        {"for pp in range(1, min(devices, shape.blocks) + 1)": "for pp in reversed(range(1, shape.blocks + 1))"},
    ],
}
