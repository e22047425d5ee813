"""Wrong answers to the exercises of lesson 16."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "hierarchical_all_reduce": (
        WrongAnswer(
            "flat, over all ranks",
            "group",
            'the group of each collective is all ranks, should be mesh["local"], mesh["host"], mesh["local"]',
            body="dist.all_reduce(tensor)",
            n=(4,),
        ),
        WrongAnswer(
            "the groups have changed places",
            "group",
            'the group of each collective is mesh["host"], ',
            {'mesh["local"].get_group(), mesh["host"]': 'mesh["host"].get_group(), mesh["local"]'},
        ),
        WrongAnswer("must divide", "runs", "shape (3, 5)", {"-(-size // n)": "size // n"}),
        WrongAnswer(
            "no all-gather",
            "value",
            "`tensor` is",
            {"dist.all_gather(list(parts), mine, group=local)": "parts[dist.get_rank(local)] = mine"},
        ),
        WrongAnswer(
            "in float32",
            "value",
            "`tensor` is wrong in 16 of 16 elements",
            {"tensor.new_zeros(n, -(-size // n))": "torch.zeros(n, -(-size // n))"},
            n=(4,),
        ),
        WrongAnswer("a new tensor", "value", "`tensor` is", {"tensor.copy_(parts": "return (parts"}),
    ),
    "bytes_out_of_hosts": (
        WrongAnswer("half", "value", "in blocks: ring [0, 1, 2, 3]: the result['a'] is 30", {"2 * (n - 1)": "(n - 1)"}),
        WrongAnswer(
            "inside counted",
            "value",
            "in blocks: ring [0, 1, 2, 3]: the result['a'] is 120, should be 60",
            {"host_of[rank] != host_of[successor]": "rank != successor"},
        ),
        WrongAnswer("an open ring", "value", "the result['b'] is 0", {"enumerate(ring)": "enumerate(ring[:-1])"}),
        WrongAnswer(
            "hosts missing",
            "value",
            "the result is {'b': 0}, should be {'a': 0, 'b': 0}",
            {"host_of.values()": "(host_of[rank] for rank in ring)"},
        ),
        WrongAnswer("all ranks take part", "value", "2 ranks of 4", {"size // n": "size // len(host_of)"}),
        WrongAnswer("floats", "value", "hosts of 4, 2 and 1", {"* (n - 1) * size // n": "* int((n - 1) / n * size)"}),
    ),
    "save_and_load": (
        WrongAnswer(
            "into the file itself",
            "value",
            "after a save that was interrupted, load raises",
            {"partial)\n": "path)\n", "        os.replace(partial, path)": "        # no need"},
        ),
        WrongAnswer(
            "the old file goes first",
            "value",
            "save(…, 3) and a save that was interrupted is 0, should be 3",
            {"        torch.save(": "        os.path.exists(path) and os.remove(path)\n        torch.save("},
        ),
        WrongAnswer(
            "the optimizer is left out",
            "value",
            "after a step with the loaded optimizer",
            {'        optimizer.load_state_dict(saved["optimizer"])\n': ""},
        ),
        WrongAnswer("no step", "value", "is None, should be 3", {'        return saved["step"]\n': ""}),
        WrongAnswer(
            "nothing was saved yet",
            "runs",
            "FileNotFoundError",
            {"        if not os.path.exists(path):\n            return 0\n": ""},
        ),
    ),
    "resume": (
        WrongAnswer(
            "the new batch size",
            "value",
            "your step has n × per_rank = 6 items, should have ranks × per_rank",
            {'saved["ranks"] * saved': "n * saved"},
        ),
        WrongAnswer(
            "the same order in each epoch",
            "value",
            "your step 4 is the run's step 0, should be the run's step 4",
            {"order(epoch)": "order(0)"},
        ),
        WrongAnswer(
            "the remainder is left out",
            "value",
            "your step 4 is the run's step 5, should be the run's step 4",
            {'-(-saved["items"] // batch)': 'saved["items"] // batch'},
        ),
        WrongAnswer(
            "blocks",
            "value",
            "the part of rank 0 of 4 is [[",
            {"items[rank::n]": "items[rank * len(items) // n : (rank + 1) * len(items) // n]"},
        ),
        WrongAnswer(
            "from the beginning",
            "value",
            "your step 1 is the run's step 0",
            {'range(saved["done"], saved["done"] + steps)': "range(steps)"},
        ),
        WrongAnswer(
            "the old number of ranks", "value", "of the run has", {"items[rank::n]": 'items[rank :: saved["ranks"]]'}
        ),
    ),
    "saving_interval": (
        WrongAnswer("a host's failures", "value", "hosts=24", {" / hosts": ""}),
        WrongAnswer("no root", "value", "hosts=1", {"sqrt(": "("}),
        WrongAnswer("days for seconds", "value", "hosts=1", {" * 24 * 3600": ""}),
        WrongAnswer("restarts count", "value", "restart=1800", {"_failures)": "_failures + 2 * save * restart)"}),
    ),
    "faulty_host": (
        WrongAnswer(
            "127.0.1.1 always",
            "value",
            "recording job_3",
            {
                '        if "Unable': (
                    '        if "127.0.1.1" in log:\n            return host, "name"\n        if "Unable'
                )
            },
        ),
        WrongAnswer(
            "who timed out", "value", "recording job_", {'f"trying to connect to ({own_address},"': '"timed out"'}
        ),
        WrongAnswer("the first host", "value", "recording job_1", body='return list(logs)[0], "interface"'),
        WrongAnswer(
            "this recording's card", "value", "job_1", {"Unable to find address for": "GLOO_SOCKET_IFNAME=ens5"}
        ),
    ),
}
