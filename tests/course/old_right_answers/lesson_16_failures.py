"""Unusual right answers of lesson 16, failures: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
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
        {"sqrt(2 * save * between_failures)": "sqrt(2 * save * between_failures) - save"},
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
}
