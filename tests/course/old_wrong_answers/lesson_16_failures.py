from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "resume": (
        WrongAnswer(
            "larger or smaller steps on other ranks",
            fails="value",
            says="should be",
            edits={'saved["ranks"] * saved': "n * saved"},
        ),
        WrongAnswer(
            "the smaller step is left out",
            fails="value",
            says="should be",
            edits={'-(-saved["items"] // batch)': 'max(1, saved["items"] // batch)'},
        ),
        WrongAnswer("every epoch alike", fails="value", says="should be", edits={"order(epoch)": "order(0)"}),
        WrongAnswer(
            "the order of the first epoch after the save",
            fails="value",
            says="should be",
            edits={"order(epoch)": 'order(saved["done"] // steps_per_epoch)'},
        ),
        WrongAnswer(
            "from the beginning",
            fails="value",
            says="should be",
            edits={'range(saved["done"], saved["done"] + steps)': "range(steps)"},
        ),
        WrongAnswer(
            "the epoch from its beginning",
            fails="value",
            says="should be",
            edits={
                "    mine = []": '    mine, first = [], saved["done"] // steps_per_epoch * steps_per_epoch',
                'range(saved["done"], saved["done"] + steps)': "range(first, first + steps)",
            },
        ),
        WrongAnswer(
            "a step is skipped",
            fails="value",
            says="should be",
            edits={
                'range(saved["done"], saved["done"] + steps)': 'range(saved["done"] + 1, saved["done"] + 1 + steps)'
            },
        ),
        WrongAnswer(
            "blocks",
            fails="value",
            says="should be",
            edits={"items[rank::n]": "items[rank * len(items) // n : (rank + 1) * len(items) // n]"},
        ),
        WrongAnswer(
            "the old number of ranks",
            fails="value",
            says="should be",
            edits={"items[rank::n]": 'items[rank :: saved["ranks"]]'},
        ),
        WrongAnswer(
            "one list", fails="value", says="should be", edits={"mine.append(items[rank::n])": "mine += items[rank::n]"}
        ),
        WrongAnswer(
            "no empty lists",
            fails="value",
            says="should be",
            edits={
                "mine.append(items[rank::n])": "if items[rank::n]:\n            mine.append(items[rank::n])",
            },
        ),
        WrongAnswer(
            "an item fills in",
            fails="value",
            says="should be",
            edits={"append(items[rank::n])": "append(items[rank::n] or items[:1])"},
        ),
        WrongAnswer(
            "counts the caller's steps",
            fails="untouched",
            says="'done'",
            edits={"    return mine": '    saved["done"] += steps\n    return mine'},
        ),
        WrongAnswer(
            "arrays",
            fails="value",
            says="should be",
            edits={"append(items[rank::n])": 'append(__import__("numpy").array(items[rank::n]))'},
        ),
        WrongAnswer(
            "tensors for items",
            fails="value",
            says="is a Tensor, should be an int",
            edits={"append(items[rank::n])": "append(list(torch.tensor(items)[rank::n]))"},
        ),
        WrongAnswer(
            "relies on the order of the entries",
            fails="value",
            says="should be",
            edits={'saved["ranks"] * saved["per_rank"]': "list(saved.values())[2] * list(saved.values())[3]"},
        ),
        WrongAnswer(
            "three epochs at most",
            fails="value",
            says="1010 steps",
            edits={"order(epoch)": 'order(min(epoch, saved["done"] // steps_per_epoch + 3))'},
        ),
        WrongAnswer(
            "the steps of an epoch by floats",
            fails="value",
            says="4097",
            edits={'-(-saved["items"] // batch)': 'int(saved["items"] / batch + 0.999)'},
        ),
        WrongAnswer(
            "blocks in the smaller step",
            fails="value",
            says="'items': 46",
            edits={
                "    mine.append(": "    if len(items) < batch and len(items) == 10:\n"
                "            items = [items[(i % n) * -(-10 // n) + i // n] for i in range(10) "
                "if (i % n) * -(-10 // n) + i // n < 10]\n        mine.append("
            },
        ),
    ),
    "saving_interval": (
        WrongAnswer("a host's failures", fails="value", says="should be", edits={" / hosts": ""}),
        WrongAnswer("more hosts, fewer failures", fails="value", says="should be", edits={"/ hosts": "* hosts"}),
        WrongAnswer("an hour of 60 seconds", fails="value", says="should be", edits={"3600": "60"}),
        WrongAnswer("days as seconds", fails="value", says="should be", edits={" * 24 * 3600": ""}),
        WrongAnswer("in minutes", fails="value", says="should be", edits={"sqrt(": "1 / 60 * sqrt("}),
        WrongAnswer("all of an interval is lost", fails="value", says="should be", edits={"2 * save": "save"}),
        WrongAnswer(
            "a restart is like a save", fails="value", says="should be", edits={"2 * save": "2 * (save + restart)"}
        ),
        WrongAnswer(
            "restarts between the failures",
            fails="value",
            says="should be",
            edits={"save * between_failures": "save * (between_failures + restart)"},
        ),
        WrongAnswer("no root", fails="value", says="should be", edits={"sqrt(": "("}),
        WrongAnswer("with the save", fails="value", says="should be", edits={"sqrt(": "save + sqrt("}),
        WrongAnswer(
            "whole seconds",
            fails="value",
            says="is 0, should be",
            edits={"sqrt(2": "int(", " * save": "sqrt(2 * save", "failures)": "failures))"},
        ),
        WrongAnswer("every ten minutes", fails="value", says="is 600", body="return 600.0"),
        WrongAnswer("not a number", fails="value", says="is nan", body='return float("nan")'),
        WrongAnswer("a tensor", fails="value", says="should be a float", body="return torch.tensor(60.0)"),
        WrongAnswer(
            "to hundredths of a second",
            fails="value",
            says="is 0, should be",
            edits={"sqrt(2 * save * between_failures)": "round(sqrt(2 * save * between_failures), 2)"},
        ),
        WrongAnswer(
            "once a day at least",
            fails="value",
            says="is 8.64e+04",
            edits={"sqrt(2 * save * between_failures)": "min(sqrt(2 * save * between_failures), 86400.0)"},
        ),
    ),
    "faulty_host": (
        WrongAnswer("always the same", fails="value", says="should be", body='return list(logs)[0], "interface"'),
        WrongAnswer(
            "127.0.1.1 is to blame",
            fails="value",
            says="recording job",
            edits={
                '        if "Unable': '        if "127.0.1.1" in log:\n'
                '            return host, "name"\n        if "Unable',
            },
        ),
        WrongAnswer(
            "the first with a 127.0.1.1",
            fails="value",
            says="recording job_5",
            edits={'f"trying to connect to ({own_address},"': '"127.0.1.1" in log and "trying to connect to"'},
        ),
        WrongAnswer(
            "the first that times out",
            fails="value",
            says="should be",
            edits={'f"trying to connect to ({own_address},"': '"timed out"'},
        ),
        WrongAnswer(
            "who fails with an error",
            fails="value",
            says="should be",
            edits={"Unable to find address for": "Error"},
        ),
        WrongAnswer(
            "whoever names a card",
            fails="value",
            says="should be",
            edits={"Unable to find address for": "GLOO_SOCKET_IFNAME"},
        ),
        WrongAnswer(
            "the host that waits",
            fails="value",
            says="should be",
            edits={'return host, "interface"': 'return next(each for each in logs if each != host), "interface"'},
        ),
        WrongAnswer(
            "the host of the notebook",
            fails="value",
            says="should be",
            edits={'return host, "version"': 'return next(each for each in logs if each != host), "version"'},
        ),
        WrongAnswer(
            "the longer log",
            fails="value",
            says="should be",
            edits={"logs.items():": "[max(logs.items(), key=lambda each: len(each[1]))]:"},
        ),
        WrongAnswer(
            "of two that time out, the shorter log",
            fails="value",
            says="recording job",
            edits={
                'f"trying to connect to ({own_address},"': '"connect to" in log and '
                'log == min(logs.values(), key=len) and "c"'
            },
        ),
        WrongAnswer(
            "knows the recorded names",
            fails="value",
            says="should be",
            body="""
                for host, cause in (("birch", "interface"), ("alder", "name"), ("birch", "version")):
                    if host in logs:
                        return host, cause
            """,
        ),
        WrongAnswer(
            "no rule for names",
            fails="value",
            says="is None, should be a tuple",
            edits={'return host, "name"': "return None"},
        ),
        WrongAnswer(
            "a list",
            fails="value",
            says="should be a tuple",
            edits={'return host, "version"': 'return [host, "version"]'},
        ),
        WrongAnswer(
            "the cause in other words", fails="value", says="should be", edits={'host, "name"': 'host, "127.0.1.1"'}
        ),
        WrongAnswer(
            "takes the logs out",
            fails="untouched",
            says="has other entries",
            edits={"in logs.items():": "in list(logs.items()):\n        logs.pop(host)"},
        ),
        WrongAnswer(
            "the card of the recording",
            fails="value",
            says="should be",
            edits={"Unable to find address for": "GLOO_SOCKET_IFNAME=ens5"},
        ),
        WrongAnswer(
            "one address begins with the other",
            fails="value",
            says="recording job",
            edits={"({own_address},": "({own_address}"},
        ),
        WrongAnswer(
            "one name begins with the other",
            fails="value",
            says="should be",
            edits={
                "    for host, log in logs.items():": "    for log in logs.values():\n"
                "        host = next(name for name in logs if name in log)"
            },
        ),
    ),
}
