"""Wrong answers to the exercises of lesson 15."""

from tests.course.answers import WrongAnswer

WRONG_ANSWERS = {
    "bytes_of_rank": (
        WrongAnswer("one micro-batch", "value", "pp 4, 8 tokens", {"pp * blocks * model": "blocks * model"}),
        WrongAnswer(
            "parameters uncut by tp", "value", "tp 4, no tokens", {'model["parameters"] // tp': 'model["parameters"]'}
        ),
        WrongAnswer("activations uncut by tp", "value", "tp 4, 8 tokens", {"tokens // tp\n": "tokens\n"}),
        WrongAnswer("shared over all devices", "value", "dp 5, tp 2, pp 3", {"// dp": "// (dp * tp * pp)"}),
        WrongAnswer(
            "activations shared over dp", "value", "dp 4, stage 3, 8 tokens", {"tokens // tp\n": "tokens // tp // dp\n"}
        ),
        WrongAnswer(
            "ZeRO-1 shares gradients", "value", "dp 4, stage 1, no tokens", {"(0, 12, 14, 16)": "(0, 14, 14, 16)"}
        ),
        WrongAnswer("a float", "value", "is 2112000.0 (float), should be 2112000 (int)", {"dp\n": "dp + 0.0\n"}),
    ),
    "devices_needed": (
        WrongAnswer("rounded down", "value", "stage 3, 0 bytes", {"-(-shared // room)": "shared // room"}),
        WrongAnswer(
            "activations are shared", "value", "stage 2, 1,000 bytes of act", {"memory - activations -": "memory -"}
        ),
        WrongAnswer("0 where none helps", "value", "the result is 0, should be None", {"None": "0"}),
        WrongAnswer(
            "a full GPU is refused",
            "value",
            "16,000 bytes, stage 0, 0 bytes of activations: the result is None, should be 1",
            {"room < 0 or": "room <= 0 or"},
        ),
        WrongAnswer("no room is no case", "runs", "ZeroDivisionError", {" or (room == 0 and shared)": ""}),
    ),
    "smallest_batch": (
        WrongAnswer(
            "as in an all-reduce",
            "value",
            "alpha = 0, n = 2: the result is 1024, should be 512",
            {"2 * weights * (n - 1)": "4 * weights * (n - 1)"},
        ),
        WrongAnswer("sends all bytes", "value", "alpha = 0, n = 2", {" * (n - 1) / n": ""}),
        WrongAnswer("no alpha", "value", "alpha = 2⁻¹⁰, n = 8", {"alpha + sent": "sent"}),
        WrongAnswer("rounded down", "value", "is 682, should be 683", {"ceil(": "int("}),
    ),
    "step_seconds": (
        WrongAnswer("no bubble", "value", "pp 4: ", {"(layout.micro_batches + layout.pp - 1)": "layout.micro_batches"}),
        WrongAnswer(
            "gradients after every micro-batch",
            "value",
            "dp 4: ",
            {"(compute + messages) + reduce": "(compute + messages + reduce)"},
        ),
        WrongAnswer("forward alone", "value", "one GPU, one micro-batch", {"(8 if again else 6)": "2"}),
        WrongAnswer("checkpointing is free", "value", "with checkpointing", {"(8 if again else 6)": "6"}),
        WrongAnswer("messages in forward alone", "value", "tp 4: ", {"(12 if again else 8)": "4"}),
        WrongAnswer(
            "gradients of the whole model",
            "value",
            "dp 4 × tp 4: ",
            {"all_reduce(2 * weights)": "all_reduce(2 * shape.blocks * shape.block)"},
        ),
        WrongAnswer(
            "replicas are neighbours",
            "value",
            "dp 4 × tp 4: ",
            {"(layout.dp, layout.tp * layout.pp)": "(layout.dp, 1)"},
        ),
    ),
    "choose_layout": (
        WrongAnswer("no memory test", "value", "does not fit: a rank needs", {"> 0.9 * cluster": "> 1e9 * cluster"}),
        WrongAnswer("no checkpointing", "value", "is None, should be a layout", {"(False, True)": "(False,)"}),
        WrongAnswer("no pipeline", "value", "is None, should be a layout", {"min(devices, shape.blocks) + 1": "2"}),
        WrongAnswer("no stage a block", "value", "12 heads", {"shape.blocks) + 1": "shape.blocks - 1) + 1"}),
        WrongAnswer("no tp", "value", " takes ", {"min(devices, cluster.per_node) + 1": "2"}),
        WrongAnswer("tp that leaves a node", "value", "8 GPUs, and tp is 5", {"cluster.per_node % tp or ": ""}),
        WrongAnswer("heads cut in pieces", "value", "tp should divide 25 heads", {" or shape.kv_heads % tp": ""}),
        WrongAnswer("idle GPUs", "value", "9 GPUs, and there are 10", {"dp * tp * pp != devices": "not dp"}),
        WrongAnswer("sequences left over", "value", "not divide the batch of 100", {" or batch % dp": ""}),
        WrongAnswer("the first that fits", "value", "takes 2", {"if seconds < least": "if best is None"}),
    ),
}
