"""Wrong answers to the exercises of lesson 16."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "hierarchical_all_reduce": (
        WrongAnswer(
            "flat, over all ranks",
            fails="group",
            says='the group of each collective is all ranks, should be mesh["local"], mesh["host"], mesh["local"]',
            body="dist.all_reduce(tensor)",
            n=(4,),
        ),
        WrongAnswer(
            "the whole tensor between hosts",
            fails="cost",
            says="256 bytes from one rank, budget 192",
            body="""
                for name in ("local", "host"):
                    dist.all_reduce(tensor, group=mesh[name].get_group())
            """,
            n=(4,),
        ),
        WrongAnswer(
            "the two groups have changed places",
            fails="group",
            says='the group of each collective is mesh["host"], ',
            edits={'mesh["local"].get_group(), mesh["host"]': 'mesh["host"].get_group(), mesh["local"]'},
        ),
        WrongAnswer("only what divides", fails="runs", says="shape (3, 5)", edits={"-(-size // n)": "size // n"}),
        WrongAnswer(
            "no all-gather",
            fails="value",
            says="`tensor` is",
            edits={"dist.all_gather(list(parts), mine, group=local)": "parts[dist.get_rank(local)] = mine"},
        ),
        WrongAnswer(
            "every host for itself",
            fails="value",
            says="`tensor` is",
            edits={"dist.all_reduce(mine, group=between)": "pass"},
        ),
        WrongAnswer(
            "in float32",
            fails="value",
            says="`tensor` is wrong in 16 of 16 elements",
            edits={"tensor.new_zeros(n, -(-size // n))": "torch.zeros(n, -(-size // n))"},
            n=(4,),
        ),
        WrongAnswer("a new tensor", fails="value", says="`tensor` is", edits={"tensor.copy_(parts": "return (parts"}),
    ),
    "bytes_out_of_hosts": (
        WrongAnswer(
            "half of what an all-reduce sends",
            fails="value",
            says="4 ranks in blocks: ring [0, 1, 2, 3]: the result['a'] is 30, should be 60",
            edits={"2 * (n - 1)": "(n - 1)"},
        ),
        WrongAnswer(
            "inside hosts too",
            fails="value",
            says="4 ranks in blocks: ring [0, 1, 2, 3]: the result['a'] is 120, should be 60",
            edits={"host_of[rank] != host_of[successor]": "rank != successor"},
        ),
        WrongAnswer(
            "an open ring",
            fails="value",
            says="the result['b'] is 0",
            edits={"enumerate(ring)": "enumerate(ring[:-1])"},
        ),
        WrongAnswer(
            "the ring's hosts only",
            fails="value",
            says="2 ranks of 4, on one host: ring [3, 2]: the result has the keys ['b'], should have ['a', 'b']",
            edits={"host_of.values()": "(host_of[rank] for rank in ring)"},
        ),
        WrongAnswer(
            "all ranks take part", fails="value", says="2 ranks of 4", edits={"size // n": "size // len(host_of)"}
        ),
        WrongAnswer(
            "in floats",
            fails="value",
            says="7 ranks on hosts of 4, 2 and 1",
            edits={"2 * (n - 1) * size // n": "int(2 * (n - 1) / n * size)"},
        ),
        WrongAnswer(
            "in the order of the numbers",
            fails="value",
            says="hosts in turn",
            edits={"    n = len(ring)": "    ring = sorted(ring)\n    n = len(ring)"},
        ),
        WrongAnswer(
            "closes the caller's list",
            fails="untouched",
            says="`ring`",
            edits={
                "    for i": "    ring.append(ring[0])\n    for i",
                "enumerate(ring)": "enumerate(ring[:-1])",
                "(i + 1) % n": "i + 1",
            },
        ),
    ),
    "save_and_load": (
        WrongAnswer(
            "into the file itself",
            fails="value",
            says="after a save that was interrupted, load raises",
            edits={"partial)\n": "path)\n", "        os.replace(partial, path)": "        # no need"},
        ),
        WrongAnswer(
            "the old file goes first",
            fails="value",
            says="save(…, 3) and a save that was interrupted is 0, should be 3",
            edits={
                "        torch.save(": "        if os.path.exists(path):\n"
                "            os.remove(path)\n        torch.save("
            },
        ),
        WrongAnswer(
            "never renamed",
            fails="value",
            says="what load returns after save(…, 3) is 0, should be 3",
            edits={"        os.replace(partial, path)": "        # now it is there"},
        ),
        WrongAnswer(
            "the optimizer is left out",
            fails="value",
            says="after a step with the loaded optimizer",
            edits={'        optimizer.load_state_dict(saved["optimizer"])\n': ""},
        ),
        WrongAnswer(
            "the model is left out",
            fails="value",
            says="the loaded model: 'weight' is",
            edits={'        model.load_state_dict(saved["model"])\n': ""},
        ),
        WrongAnswer(
            "no step", fails="value", says="is None, should be 3", edits={'        return saved["step"]\n': ""}
        ),
        WrongAnswer(
            "nothing was saved yet",
            fails="runs",
            says="FileNotFoundError",
            edits={"        if not os.path.exists(path):\n            return 0\n": ""},
        ),
    ),
    "resume": (
        WrongAnswer(
            "larger or smaller steps on other ranks",
            fails="value",
            says="your step has n × per_rank = 6 items, should have ranks × per_rank",
            edits={'saved["ranks"] * saved': "n * saved"},
        ),
        WrongAnswer(
            "every epoch alike",
            fails="value",
            says="your step 4 is the run's step 0, should be the run's step 4",
            edits={"order(epoch)": "order(0)"},
        ),
        WrongAnswer(
            "the smaller step is left out",
            fails="value",
            says="your step 4 is the run's step 5, should be the run's step 4",
            edits={'-(-saved["items"] // batch)': 'max(1, saved["items"] // batch)'},
        ),
        WrongAnswer(
            "blocks",
            fails="value",
            says="the part of rank 0 of 4 is [[",
            edits={"items[rank::n]": "items[rank * len(items) // n : (rank + 1) * len(items) // n]"},
        ),
        WrongAnswer(
            "from the beginning",
            fails="value",
            says="your step 1 is the run's step 0, should be the run's step 1",
            edits={'range(saved["done"], saved["done"] + steps)': "range(steps)"},
        ),
        WrongAnswer(
            "the epoch from its beginning",
            fails="value",
            says="your step 1 is the run's step 0",
            edits={
                "    mine = []": '    mine, first = [], saved["done"] // steps_per_epoch * steps_per_epoch',
                'range(saved["done"], saved["done"] + steps)': "range(first, first + steps)",
            },
        ),
        WrongAnswer(
            "the old number of ranks",
            fails="value",
            says="your step 1 is 6 items that no step of the run has",
            edits={"items[rank::n]": 'items[rank :: saved["ranks"]]'},
        ),
        WrongAnswer(
            "one list",
            fails="value",
            says="should get 2 lists",
            edits={"mine.append(items[rank::n])": "mine += items[rank::n]"},
        ),
        WrongAnswer(
            "counts the caller's steps",
            fails="untouched",
            says="`saved`['done'] is 3, should be 1",
            edits={"    return mine": '    saved["done"] += steps\n    return mine'},
        ),
    ),
    "saving_interval": (
        WrongAnswer("a host's failures", fails="value", says="hosts=24", edits={" / hosts": ""}),
        WrongAnswer("no root", fails="value", says="hosts=1", edits={"sqrt(": "("}),
        WrongAnswer("days as seconds", fails="value", says="hosts=1", edits={" * 24 * 3600": ""}),
        WrongAnswer("in minutes", fails="value", says="hosts=1", edits={"sqrt(": "1 / 60 * sqrt("}),
        WrongAnswer("all of an interval is lost", fails="value", says="hosts=1", edits={"2 * save": "save"}),
        WrongAnswer(
            "restarts between the failures",
            fails="value",
            says="restart=1800",
            edits={"save * between_failures": "save * (between_failures + restart)"},
        ),
        WrongAnswer(
            "a restart is like a save", fails="value", says="restart=1800", edits={"2 * save": "2 * (save + restart)"}
        ),
    ),
    "faulty_host": (
        WrongAnswer(
            "127.0.1.1 always",
            fails="value",
            says="recording job_3",
            edits={
                '        if "Unable': '        if "127.0.1.1" in log:\n'
                '            return host, "name"\n        if "Unable',
            },
        ),
        WrongAnswer(
            "who timed out",
            fails="value",
            says="recording job_",
            edits={'f"trying to connect to ({own_address},"': '"timed out"'},
        ),
        WrongAnswer(
            "the first host",
            fails="value",
            says="recording job_",
            body='return list(logs)[0], "interface"',
        ),
        WrongAnswer(
            "the host that waits",
            fails="value",
            says="recording job_1",
            edits={'return host, "interface"': 'return next(each for each in logs if each != host), "interface"'},
        ),
        WrongAnswer(
            "the host of the notebook",
            fails="value",
            says="recording job_3",
            edits={'return host, "version"': 'return next(each for each in logs if each != host), "version"'},
        ),
        WrongAnswer(
            "the card of the recording",
            fails="value",
            says="should be",
            edits={"Unable to find address for": "GLOO_SOCKET_IFNAME=ens5"},
        ),
    ),
}
