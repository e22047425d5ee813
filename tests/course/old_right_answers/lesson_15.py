"""Unusual right answers of lesson 15: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
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
}
