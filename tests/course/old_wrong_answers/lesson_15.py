"""Wrong answers to the exercises of lesson 15."""

from tests.course.wrong_answer import WrongAnswer

WRONG_ANSWERS = {
    "bytes_of_rank": (
        WrongAnswer(
            "shared out over all devices", fails="value", says="should be", edits={"// dp": "// (dp * tp * pp)"}
        ),
        WrongAnswer(
            "ZeRO-1 shares the gradients too",
            fails="value",
            says="should be",
            edits={"(0, 12, 14, 16)": "(0, 14, 14, 16)"},
        ),
        WrongAnswer(
            "stage 3 keeps the weights", fails="value", says="should be", edits={"(0, 12, 14, 16)": "(0, 12, 14, 14)"}
        ),
        WrongAnswer(
            "DDP shares the state", fails="value", says="should be", edits={"(0, 12, 14, 16)": "(12, 12, 14, 16)"}
        ),
        WrongAnswer(
            "one micro-batch's activations",
            fails="value",
            says="should be",
            edits={"pp * blocks * model": "blocks * model"},
        ),
        WrongAnswer(
            "activations shared out over dp",
            fails="value",
            says="should be",
            edits={"tokens // tp\n": "tokens // tp // dp\n"},
        ),
        WrongAnswer(
            "activations of all blocks",
            fails="value",
            says="should be",
            edits={"pp * blocks * model": "pp * pp * blocks * model"},
        ),
        WrongAnswer("activations not cut by tp", fails="value", says="should be", edits={"tokens // tp\n": "tokens\n"}),
        WrongAnswer(
            "matrices not cut by tp",
            fails="value",
            says="should be",
            edits={'model["parameters"] // tp': 'model["parameters"]'},
        ),
        WrongAnswer("a float", fails="value", says="is a float, should be an int", edits={"dp\n": "dp + 0.0\n"}),
        WrongAnswer("no master weights", fails="value", says="should be", edits={"(16 - shared)": "(12 - shared)"}),
        WrongAnswer(
            "in floats, cut at the end",
            fails="value",
            says="should be",
            edits={"shared * parameters // dp": "int(shared * parameters / dp)"},
        ),
        WrongAnswer(
            "counts the blocks down",
            fails="untouched",
            says="blocks",
            edits={"// pp\n": '// pp\n    model["blocks"] = blocks\n'},
        ),
    ),
    "devices_needed": (
        WrongAnswer("rounded down", fails="value", says="should be", edits={"-(-shared // room)": "shared // room"}),
        WrongAnswer(
            "always one more", fails="value", says="should be", edits={"-(-shared // room)": "shared // room + 1"}
        ),
        WrongAnswer(
            "activations are shared out too",
            fails="value",
            says="should be",
            edits={"memory - activations -": "memory -"},
        ),
        WrongAnswer("0 where none is enough", fails="value", says="should be None", edits={"return None": "return 0"}),
        WrongAnswer(
            "DDP is one device, fit or not",
            fails="value",
            says="should be None",
            edits={"room < 0 or": "room < 0 and shared or"},
        ),
        WrongAnswer(
            "a full device is too full", fails="value", says="should be 1", edits={"room < 0 or": "room <= 0 or"}
        ),
        WrongAnswer(
            "everything is shared out", fails="value", says="should be", edits={"(0, 12, 14, 16)": "(16, 16, 16, 16)"}
        ),
        WrongAnswer("ZeRO-2 is ZeRO-1", fails="value", says="should be", edits={"(0, 12, 14, 16)": "(0, 12, 12, 16)"}),
        WrongAnswer(
            "in floats", fails="value", says="should be", edits={"-(-shared // room)": "int(-(-shared / room // 1))"}
        ),
        WrongAnswer(
            "powers of two",
            fails="value",
            says="should be",
            edits={"max(1, -(-shared // room))": "1 << (-(-shared // room) - 1).bit_length()"},
        ),
        WrongAnswer(
            "divides by a room of 0", fails="runs", says="ZeroDivisionError", edits={" or (room == 0 and shared)": ""}
        ),
        WrongAnswer("no optimizer", fails="value", says="should be", edits={"(16 * parameters": "(4 * parameters"}),
    ),
    "smallest_batch": (
        WrongAnswer("sends all bytes", fails="value", says="should be", edits={" * (n - 1) / n": ""}),
        WrongAnswer(
            "as in an all-reduce",
            fails="value",
            says="should be",
            edits={"2 * weights * (n - 1)": "4 * weights * (n - 1)"},
        ),
        WrongAnswer("without alpha", fails="value", says="should be", edits={"alpha + sent": "sent"}),
        WrongAnswer("rounded down", fails="value", says="should be", edits={"ceil(": "int("}),
        WrongAnswer("rounded to the nearest", fails="value", says="should be", edits={"ceil(": "round("}),
        WrongAnswer(
            "four bytes a weight", fails="value", says="should be", edits={"sent = 2 * weights": "sent = 4 * weights"}
        ),
        WrongAnswer(
            "one operation a weight",
            fails="value",
            says="should be",
            edits={"flops / (2 * weights)": "flops / weights"},
        ),
        WrongAnswer(
            "six operations a weight",
            fails="value",
            says="should be",
            edits={"flops / (2 * weights)": "flops / (6 * weights)"},
        ),
        WrongAnswer(
            "not rounded", fails="value", says="is a float, should be an int", edits={"ceil(seconds": "(seconds"}
        ),
        WrongAnswer("of all devices", fails="value", says="should be", edits={"ceil(seconds": "ceil(n * seconds"}),
        WrongAnswer(
            "the weights cancel, alpha with them",
            fails="value",
            says="should be",
            body="return ceil(flops / bandwidth * (n - 1) / n)",
        ),
        WrongAnswer(
            "more than equality asks for", fails="value", says="should be", edits={"return ceil(": "return 1 + int("}
        ),
    ),
    "choose_layout": (
        WrongAnswer(
            "leaves out a stage for each block",
            fails="value",
            says="is None, should be a Layout",
            edits={"range(1, shape.blocks + 1)": "range(1, max(2, shape.blocks))"},
        ),
        WrongAnswer(
            "takes the whole memory", fails="value", says="does not fit", edits={"> 0.9 * cluster": "> 1.1 * cluster"}
        ),
        WrongAnswer(
            "does not look at the memory",
            fails="value",
            says="does not fit",
            edits={"> 0.9 * cluster": "> 1e9 * cluster"},
        ),
        WrongAnswer("never checkpoints", fails="value", says="should be a Layout", edits={"(False, True)": "(False,)"}),
        WrongAnswer("always checkpoints", fails="value", says="times as long", edits={"(False, True)": "(True,)"}),
        WrongAnswer(
            "the first that fits", fails="value", says="times as long", edits={"if took < seconds": "if best is None"}
        ),
        WrongAnswer(
            "the slowest",
            fails="value",
            says="times as long",
            edits={'float("inf")': "0.0", "took < seconds": "took > seconds"},
        ),
        WrongAnswer(
            "data parallelism alone",
            fails="value",
            says="times as long",
            edits={"if dp * tp * pp != devices": "if dp != devices"},
        ),
        WrongAnswer("no pipeline", fails="value", says="times as long", edits={"shape.blocks + 1": "2"}),
        WrongAnswer(
            "no tensor parallelism",
            fails="value",
            says="times as long",
            edits={"min(devices, cluster.per_node) + 1": "2"},
        ),
        WrongAnswer(
            "forgets the bubble",
            fails="value",
            says="times as long",
            edits={
                "        took = step_time(shape, layout, cluster, sequence).total": (
                    "        took = step_time(shape, layout, cluster, sequence)\n"
                    "                    took = took.total - took.bubble"
                )
            },
        ),
        WrongAnswer(
            "powers of two",
            fails="value",
            says="times as long",
            edits={"if dp * tp * pp != devices": "if pp & (pp - 1) or dp * tp * pp != devices"},
        ),
        WrongAnswer(
            "tp over nodes",
            fails="value",
            says="is against the rules",
            edits={"min(devices, cluster.per_node) + 1": "devices + 1"},
        ),
        WrongAnswer(
            "heads cut in pieces", fails="value", says="is against the rules", edits={" or shape.heads % tp": ""}
        ),
        WrongAnswer(
            "idle devices", fails="value", says="devices, should have", edits={"dp * tp * pp != devices": "not dp"}
        ),
        WrongAnswer(
            "raises where nothing fits",
            fails="runs",
            says="AssertionError",
            edits={"best, seconds = layout, took": "best, seconds = layout, took\n    assert best"},
        ),
        WrongAnswer(
            "one micro-batch",
            fails="value",
            says="at a time, should take",
            edits={"1, batch // dp, stage": "batch // dp, 1, stage"},
        ),
    ),
}
