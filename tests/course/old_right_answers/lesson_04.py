"""Unusual right answers of lesson 04: edits of the reference, other bodies, or whole cells."""

RIGHT_ANSWERS = {
    "same_on_all_ranks": [
        {
            "all(torch.equal(mine, other) for": "1 == len({tuple(other.tolist()) for",
            "other in everyones)": "other in everyones})",
        },
        {"[*model.parameters(), *model.buffers()]": "[*model.buffers(), *model.parameters()]"},
        {
            "torch.tensor(list(digest.digest()), dtype=torch.uint8, device=tensor.device)": "torch.frombuffer("
            "bytearray(digest.digest()), dtype=torch.int64)"
        },
        {
            "list(digest.digest())": "list(digest.digest()[:8])",
            "torch.equal(mine, other)": "bytes(other.tolist()) == digest.digest()[:8]",
        },
        {"digest.update(": "digest.update(str(tensor.shape).encode()), digest.update("},
    ],
}
