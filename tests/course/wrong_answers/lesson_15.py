"""Wrong answers to the exercises of lesson 15."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "bytes_of_rank": (
        WrongAnswer(
            "one micro-batch's activations",
            fails="value",
            says="pp 4, 8 tokens",
            edits={"pp * blocks * model": "blocks * model"},
        ),
        WrongAnswer(
            "matrices not cut by tp",
            fails="value",
            says="tp 4, no tokens",
            edits={'model["parameters"] // tp': 'model["parameters"]'},
        ),
        WrongAnswer(
            "activations not cut by tp", fails="value", says="tp 4, 8 tokens", edits={"tokens // tp\n": "tokens\n"}
        ),
        WrongAnswer(
            "shared out over all devices", fails="value", says="dp 5, tp 2, pp 3", edits={"// dp": "// (dp * tp * pp)"}
        ),
        WrongAnswer(
            "activations shared out over dp",
            fails="value",
            says="dp 4, stage 3, 8 tokens",
            edits={"tokens // tp\n": "tokens // tp // dp\n"},
        ),
        WrongAnswer(
            "ZeRO-1 shares the gradients too",
            fails="value",
            says="dp 4, stage 1, no tokens",
            edits={"(0, 12, 14, 16)": "(0, 14, 14, 16)"},
        ),
        WrongAnswer("a float", fails="value", says=".0 (float), should be", edits={"dp\n": "dp + 0.0\n"}),
        WrongAnswer("no master weights", fails="value", says="one GPU, no", edits={"(16 - shared)": "(12 - shared)"}),
        WrongAnswer(
            "counts the blocks down",
            fails="untouched",
            says="`model`['blocks'] is 3, should be 12",
            edits={"// pp\n": '// pp\n    model["blocks"] = blocks\n'},
        ),
    ),
    "devices_needed": (
        WrongAnswer(
            "rounded down",
            fails="value",
            says="5,000 bytes, stage 3, 0 bytes of activations: the result is 3, should be 4",
            edits={"-(-shared // room)": "shared // room"},
        ),
        WrongAnswer(
            "activations are shared out too",
            fails="value",
            says="stage 2, 1,000 bytes of activations",
            edits={"memory - activations -": "memory -"},
        ),
        WrongAnswer(
            "0 where none is enough", fails="value", says="the result is 0, should be None", edits={"None": "0"}
        ),
        WrongAnswer(
            "a full GPU is too full",
            fails="value",
            says="16,000 bytes, stage 0, 0 bytes of activations: the result is None, should be 1",
            edits={"room < 0 or": "room <= 0 or"},
        ),
        WrongAnswer(
            "divides by a room of 0", fails="runs", says="ZeroDivisionError", edits={" or (room == 0 and shared)": ""}
        ),
        WrongAnswer(
            "everything is shared out",
            fails="value",
            says="15,999 bytes, stage 0",
            edits={"(0, 12, 14, 16)": "(16, 16, 16, 16)"},
        ),
        WrongAnswer("no optimizer", fails="value", says="result is 1", edits={"(16 * parameters": "(4 * parameters"}),
    ),
    "smallest_batch": (
        WrongAnswer(
            "as in an all-reduce",
            fails="value",
            says="alpha = 0, n = 2: the result is 1024, should be 512",
            edits={"2 * weights * (n - 1)": "4 * weights * (n - 1)"},
        ),
        WrongAnswer("sends all bytes", fails="value", says="alpha = 0, n = 2", edits={" * (n - 1) / n": ""}),
        WrongAnswer("without alpha", fails="value", says="alpha = 2⁻¹⁰, n = 8", edits={"alpha + sent": "sent"}),
        WrongAnswer("rounded down", fails="value", says="is 682, should be 683", edits={"ceil(": "int("}),
        WrongAnswer(
            "one operation a weight", fails="value", says="n = 2", edits={"flops / (2 * weights)": "flops / weights"}
        ),
        WrongAnswer("not rounded", fails="value", says="(float), should be", edits={"ceil(seconds": "(seconds"}),
    ),
    "step_seconds": (
        WrongAnswer(
            "no bubble",
            fails="value",
            says="pp 4: ",
            edits={"(layout.micro_batches + layout.pp - 1)": "layout.micro_batches"},
        ),
        WrongAnswer(
            "gradients after every micro-batch",
            fails="value",
            says="dp 4: ",
            edits={"(compute + messages) + reduce": "(compute + messages + reduce)"},
        ),
        WrongAnswer(
            "forward alone", fails="value", says="one GPU, one micro-batch", edits={"(8 if again else 6)": "2"}
        ),
        WrongAnswer(
            "checkpointing costs nothing", fails="value", says="with checkpointing", edits={"(8 if again else 6)": "6"}
        ),
        WrongAnswer(
            "checkpointing repeats no messages",
            fails="value",
            says="tp 4 with checkpointing",
            edits={"(12 if again else 8)": "8"},
        ),
        WrongAnswer("messages in forward alone", fails="value", says="tp 4: ", edits={"(12 if again else 8)": "4"}),
        WrongAnswer(
            "messages of all blocks",
            fails="value",
            says="tp 2 × pp 4",
            edits={"shape.blocks / layout.pp * (12": "shape.blocks * (12"},
        ),
        WrongAnswer(
            "gradients of the whole model",
            fails="value",
            says="dp 4 × tp 4",
            edits={"all_reduce(2 * weights)": "all_reduce(2 * shape.blocks * shape.block)"},
        ),
        WrongAnswer(
            "replicas are neighbours",
            fails="value",
            says="dp 4 × tp 4",
            edits={"(layout.dp, layout.tp * layout.pp)": "(layout.dp, 1)"},
        ),
        WrongAnswer("at the peak", fails="value", says="one GPU, one micro-batch", edits={"0.6 * ": ""}),
    ),
    "choose_layout": (
        WrongAnswer(
            "does not look at the memory",
            fails="value",
            says="does not fit: a rank needs",
            edits={"> 0.9 * cluster": "> 1e9 * cluster"},
        ),
        WrongAnswer(
            "the whole memory", fails="value", says="a tenth is kept", edits={"> 0.9 * cluster": "> 1.0 * cluster"}
        ),
        WrongAnswer(
            "never checkpoints",
            fails="value",
            says="the result is None, should be a layout",
            edits={"(False, True)": "(False,)"},
        ),
        WrongAnswer("always checkpoints", fails="value", says=" takes ", edits={"(False, True)": "(True,)"}),
        WrongAnswer("no pipeline", fails="value", says=" takes ", edits={"min(devices, shape.blocks) + 1": "2"}),
        WrongAnswer(
            "no tensor parallelism",
            fails="value",
            says=" takes ",
            edits={"min(devices, cluster.per_node) + 1": "2"},
        ),
        WrongAnswer(
            "idle devices",
            fails="value",
            says="these are 8 GPUs, and there are 9",
            edits={"dp * tp * pp != devices": "not dp"},
        ),
        WrongAnswer(
            "dp does not divide the batch",
            fails="value",
            says="does not divide the batch of 100",
            edits={" or batch % dp": ""},
        ),
        WrongAnswer("heads cut in pieces", fails="value", says="tp should divide", edits={" or shape.heads % tp": ""}),
        WrongAnswer(
            "tp over nodes",
            fails="value",
            says="a node has 4 GPUs, and tp is 8",
            edits={"min(devices, cluster.per_node)": "devices"},
        ),
        WrongAnswer(
            "no stage for each block",
            fails="value",
            says="GPT-2 (12 blocks",
            edits={"min(devices, shape.blocks) + 1": "max(2, min(devices, shape.blocks))"},
        ),
        WrongAnswer(
            "the first that fits", fails="value", says="takes 2", edits={"if seconds < least": "if best is None"}
        ),
    ),
}
