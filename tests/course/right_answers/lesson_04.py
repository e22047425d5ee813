"""Other right answers to the exercise of lesson 04."""

RIGHT_ANSWERS = {
    "same_on_all_ranks": [
        {"[*model.parameters(), *model.buffers()]": "[*model.buffers(), *model.parameters()]"},
        # half of the digest
        {
            "list(digest.digest())": "list(digest.digest()[:16])",
            "torch.equal(mine, other)": "bytes(other.tolist()) == digest.digest()[:16]",
        },
    ],
}
