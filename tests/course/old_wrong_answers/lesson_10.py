"""Wrong answers to the exercises of lesson 10."""

from tests.course.wrong_answer import WrongAnswer

_FORWARD = "outputs = kept[-1] @ gather(shard).T  # the whole weight has no name, so the line's end frees it"
_HAND_DOWN = "whole = gather(shard)\n        handed_down = delta @ whole\n        del whole\n        gradient"
_SUM = "dist.reduce_scatter(mine, list(gradient.split(len(shard))))"

WRONG_ANSWERS = {
    "sharded_step": (
        WrongAnswer(
            "makes the inputs finite where they lie",
            fails="value",
            says="1 layer, an input is NaN: the shard of layer 1",
            edits={"    kept = [inputs]\n": "    inputs.nan_to_num_()\n    kept = [inputs]\n"},
            also=("untouched",),
        ),
        WrongAnswer(
            "takes an output of 0 of a single layer for one that a relu has cut off",
            fails="value",
            says="1 layer, all weights 0, an input of 2⁴⁰: the shard of layer 1 is [0, 0, 0]",
            edits={
                "delta = outputs - targets\n": "delta = outputs - targets\n"
                "    delta *= (outputs != 0) if len(shards) == 1 else 1\n"
            },
        ),
        WrongAnswer(
            "a rank without items takes an item of ones",
            fails="value",
            says="the shard of layer ",
            edits={
                "    kept = [inputs]": "    if len(inputs) == 0:\n"
                "        inputs = inputs.new_ones(1, inputs.shape[1])\n"
                "        targets = targets.new_ones(1, targets.shape[1])\n    kept = [inputs]"
            },
        ),
        WrongAnswer(
            "keeps every weight from the forward for the backward",
            fails="memory",
            says="Rank 0, 2 layers: holds 9,856 elements at once, budget 7,040 (a whole matrix has 4,096).",
            edits={
                "kept = [inputs]": "kept, weights = [inputs], []",
                _FORWARD: "weights.append(gather(shard))\n        outputs = kept[-1] @ weights[-1].T",
                "whole = gather(shard)\n        handed": "whole = weights.pop()\n        handed",
            },
            also=("cost",),
        ),
        WrongAnswer(
            "a name keeps the last weight while the next one is gathered",
            fails="memory",
            says="Rank 0, 2 layers: holds",
            edits={_FORWARD: "whole = gather(shard)\n        outputs = kept[-1] @ whole.T"},
        ),
        WrongAnswer(
            "the weight is still there when its gradient is made",
            fails="memory",
            says="Rank 0, 2 layers: holds",
            edits={
                _HAND_DOWN: "whole = gather(shard)\n        handed_down = delta @ whole\n        gradient",
                "del gradient": "del gradient, whole",
            },
        ),
        WrongAnswer(
            "gathers everything at once, as if only the root were wrapped",
            fails="memory",
            says="Rank 0, 2 layers: holds",
            edits={
                "kept = [inputs]": "kept, weights = [inputs], [gather(shard) for shard in shards]",
                "for shard in shards:\n": "for weight in weights:\n",
                _FORWARD: "outputs = kept[-1] @ weight.T",
                "whole = gather(shard)\n        handed": "whole = weights.pop()\n        handed",
            },
            also=("cost",),
        ),
        WrongAnswer(
            "steps with the gradient of its own items",
            fails="value",
            says="Rank 0, 2 layers: the shard of layer 1 is wrong in",
            edits={_SUM: "mine.copy_(gradient.split(len(shard))[dist.get_rank()])"},
            also=("cost",),
        ),
        WrongAnswer(
            "all-reduces the whole gradient and takes its rows",
            fails="cost",
            says="4 ranks, 2 layers: 196,608 bytes from one rank, budget 147,456; calls all_reduce twice, budget 0;",
            edits={_SUM: "dist.all_reduce(gradient)\n        mine.copy_(gradient.split(len(shard))[dist.get_rank()])"},
        ),
        WrongAnswer(
            "hands down through the weight that has been updated already",
            fails="value",
            says="Rank 0, 2 layers: the shard of layer 1 is wrong in",
            edits={
                _HAND_DOWN: "gradient",
                "shard -= lr * mine": "shard -= lr * mine\n        handed_down = delta @ gather(shard)",
            },
        ),
        WrongAnswer(
            "uses its own rows as if they were the weight",
            fails="runs",
            says="2 layers: Ranks 0, 1, 2 and 3 raised RuntimeError",
            edits={_FORWARD: "outputs = kept[-1] @ shard.T"},
        ),
        WrongAnswer(
            "puts new tensors into the list",
            fails="untouched",
            says="has other entries than before",
            edits={"shard -= lr * mine": "shards[[s is shard for s in shards].index(True)] = shard - lr * mine"},
        ),
        WrongAnswer(
            "changes the targets",
            fails="untouched",
            says="has other values than before",
            edits={"    delta = outputs - targets": "    delta = outputs - targets\n    targets.neg_()"},
        ),
        WrongAnswer(
            "lets the gradient through where a layer puts out 0",
            fails="value",
            says=" items, seed ",
            edits={
                "kept = [inputs]": "kept, before = [inputs], []",
                "kept.append(outputs.relu())": "before.append(outputs)\n        kept.append(outputs.relu())",
                "delta = handed_down * below.sign()": (
                    "before.pop()\n        delta = handed_down * (before[-1] >= 0) if before else handed_down"
                ),
            },
        ),
        WrongAnswer(
            "empties the caller's list",
            fails="untouched",
            says="2 layers: shards has other entries than before",
            edits={
                "    for shard, below in zip(reversed(shards), reversed(kept[:-1]), strict=True):\n": (
                    "    kept.pop()\n    while shards:\n        shard, below = shards.pop(), kept.pop()\n"
                )
            },
        ),
        WrongAnswer(
            "gathers into float64, whatever the weights are",
            fails="runs",
            says="2 layers of float32",
            edits={
                "shard.new_empty(n * len(shard), shard.shape[1])": (
                    "torch.empty(n * len(shard), shard.shape[1], dtype=torch.float64)"
                )
            },
        ),
        WrongAnswer(
            "keeps the weights as Python's numbers",
            fails="memory",
            says="elements out of torch by .item()",
            edits={
                _FORWARD: "whole = gather(shard)\n        log = [each.item() for each in whole[:8].flatten()]\n"
                "        outputs = kept[-1] @ whole.T\n        del whole"
            },
        ),
        WrongAnswer(
            "gathers large shards in pieces",
            fails="cost",
            says="1 layer of many columns: calls all_gather 4 times, budget 2.",
            edits={
                "dist.all_gather(list(whole.split(len(shard))), shard)": (
                    "few = max(1, 2**16 // shard.shape[1])\n"
                    "        pieces = [each.split(few) for each in (shard, *whole.split(len(shard)))]\n"
                    "        for own, *everyones in zip(*pieces):\n"
                    "            dist.all_gather(everyones, own)"
                ),
            },
        ),
    ),
    "gather_uneven": (
        WrongAnswer(
            "takes a clone for contiguous",
            fails="runs",
            says="all_gather takes contiguous tensors only, got a strided one",
            edits={
                "    padded = ": "    padded = shard.clone() if len(shard) == k else ",
                "    padded[: len(shard)] = shard": "    if len(shard) < k:\n        padded[: len(shard)] = shard",
            },
        ),
        WrongAnswer(
            "sends a full shard as it is, strided or not",
            fails="runs",
            says="all_gather takes contiguous tensors only, got a strided one",
            edits={
                "    padded = ": "    padded = shard if len(shard) == k else ",
                "    padded[: len(shard)] = shard": "    if padded is not shard:\n        padded[: len(shard)] = shard",
            },
        ),
        WrongAnswer(
            "where the gather fails, the own rows are all there is",
            fails="runs",
            says="and a connection broke: rank 0 returned, though all_gather raised an error",
            edits={
                "    dist.all_gather(list(whole.split(k)), padded)\n": "    try:\n"
                "        dist.all_gather(list(whole.split(k)), padded)\n"
                "    except RuntimeError:\n        pass\n"
            },
        ),
        WrongAnswer(
            "pads in float32",
            fails="runs",
            says="raised",
            edits={"shard.new_zeros(k, shard.shape[1])": "torch.zeros(k, shard.shape[1], dtype=torch.float64)"},
        ),
        WrongAnswer(
            "keeps the result on the shard",
            fails="value",
            says="8 rows, the same tensor with other values: the result is wrong in",
            edits={
                "return whole[:rows]": "shard.whole = getattr(shard, 'whole', whole[:rows])\n    return shard.whole",
            },
        ),
        WrongAnswer(
            "leaves the padding in",
            fails="value",
            says="Rank 0, 5 rows: the result has shape (8, 6), should have (5, 6).",
            edits={"return whole[:rows]": "return whole"},
        ),
        WrongAnswer(
            "pads at the front",
            fails="value",
            says="Rank 0, 5 rows: the result is wrong in",
            edits={"padded[: len(shard)] = shard": "padded[k - len(shard) :] = shard"},
        ),
        WrongAnswer(
            "cuts every piece and puts the pieces together: a second copy",
            fails="memory",
            says="Rank 0, 8 rows: holds 108 elements at once, budget 72.",
            edits={
                "whole = shard.new_empty(n * k, shard.shape[1])\n    dist.all_gather(list(whole.split(k)), padded)": (
                    "pieces = [torch.empty_like(padded) for _ in range(n)]\n    dist.all_gather(pieces, padded)"
                ),
                "whole[:rows]": "torch.cat([each[: max(rows - r * k, 0)] for r, each in enumerate(pieces)])",
            },
        ),
        WrongAnswer(
            "asks all ranks first how many rows they have",
            fails="cost",
            says="calls all_gather twice, budget 1.",
            edits={
                "n = dist.get_world_size()": (
                    "n = dist.get_world_size()\n"
                    "    lengths = [torch.zeros(1, dtype=torch.int64, device=shard.device) for _ in range(n)]\n"
                    "    dist.all_gather(lengths, torch.tensor([len(shard)], device=shard.device))"
                )
            },
        ),
        WrongAnswer(
            "rounds down",
            fails="runs",
            says="5 rows: Ranks 0 and 1 raised RuntimeError",
            edits={"-(-rows // n)": "max(rows // n, 1)"},
        ),
        WrongAnswer(
            "keeps the result in the notebook",
            fails="untouched",
            says="leaves the name `memo` behind in the notebook",
            edits={
                "    k = -(-rows // n)": "    memo = globals().setdefault('memo', {})\n    k = -(-rows // n)",
                "    return whole[:rows]": "    memo[rows] = whole\n    return whole[:rows]",
            },
        ),
        WrongAnswer(
            "takes it for granted that the shard is contiguous",
            fails="runs",
            says="8 rows, strided: Ranks 0, 1, 2 and 3 raised RuntimeError: view size is not compatible",
            edits={"padded[: len(shard)] = shard": "padded.view(-1)[: shard.numel()] = shard.view(-1)"},
        ),
        WrongAnswer(
            "makes k a multiple of 8 for long weights",
            fails="cost",
            says="rows of uint8: ",
            edits={
                "k = -(-rows // n)": "q = k = -(-rows // n)\n    k = -(-q // 8) * 8 if q > 8 else q",
                "return whole[:rows]": "return torch.cat([each[:q] for each in whole.split(k)])[:rows] if k > q"
                " else whole[:rows]",
            },
            also=("memory",),
        ),
        WrongAnswer(
            "returns a number for a weight of one",
            fails="value",
            says="1 row of int32: the result has shape (1,), should have (1, 1)",
            edits={"return whole[:rows]": "return whole[:rows].squeeze(1) if whole.numel() == n else whole[:rows]"},
        ),
        WrongAnswer(
            "gathers large shards in pieces",
            fails="cost",
            says="calls all_gather twice, budget 1.",
            edits={
                "dist.all_gather(list(whole.split(k)), padded)": (
                    "few = max(1, 2**16 // shard.shape[1])\n"
                    "    pieces = [each.split(few) for each in (padded, *whole.split(k))]\n"
                    "    for own, *everyones in zip(*pieces):\n"
                    "        dist.all_gather(everyones, own)"
                ),
            },
        ),
    ),
}
