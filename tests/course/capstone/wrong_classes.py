"""Wrong classes, as edits of the reference, and the criteria that refuse them with these words; all others hold."""

SEND = "        dist.all_reduce(flat)\n"
BROADCAST = """\
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
"""
RESTORED = """\
        try:
            yield
        finally:
            self.synchronises = before
"""
WRONG_CLASSES = {
    "none: the reference in other words, with a message for each MiB": (
        {SEND: "        [work.wait() for work in [dist.all_reduce(p, async_op=True) for p in flat.split(2**18)]]\n"},
        {},
    ),
    "each rank keeps its own values": (
        {BROADCAST: ""},
        {"start": "rank 1: scale is not rank 0's after MyDDP(model)"},
    ),
    "buffers stay different": (
        {"[*model.parameters(), *model.buffers()]": "model.parameters()"},
        {"start": "scale is not rank 0's"},
    ),
    "a sum": (
        {"        flat /= self.world_size  # before the sum, which could overflow in half precision\n": ""},
        {
            "value": "is 3 times the mean over the ranks",
            "accumulation": "is 3 times the mean",
            "unused": "is 3 times the mean",
        },
    ),
    "each rank adds up in an order of its own": (
        {
            SEND: """\
        everyones = [torch.empty_like(flat) for _ in range(self.world_size)]
        dist.all_gather(everyones, flat)
        flat = sum(everyones[dist.get_rank():] + everyones[: dist.get_rank()])
"""
        },
        {
            "replicas": "is not rank 0's, bit for bit",
            "bytes": "bytes; budget",
            "frozen": "bytes; budget",
            "memory": "copies",
        },
    ),
    "a call for each parameter": (
        {SEND: "        for part in flat.split([p.numel() for p in present]):\n            dist.all_reduce(part)\n"},
        {"calls": "with 3.9 MiB of gradients makes 81 × all_reduce; budget 6"},
    ),
    "sends float64": (
        {SEND: "        wide = flat.double()\n        dist.all_reduce(wide)\n        flat.copy_(wide)\n"},
        {"bytes": "budget", "frozen": "budget", "memory": "3.00 further copies"},
    ),
    "keeps a copy": (
        {SEND: "        self.last = flat.clone()\n" + SEND},
        {"memory": "further copies of the gradients are held at the peak; budget 1"},
    ),
    "always sends": (
        {"        if not self.synchronises:\n            return\n": ""},
        {"accumulation": "inside no_sync() after an inner no_sync() has ended, a micro-batch sends: 2 × all_reduce"},
    ),
    "an exception leaves it switched off": (
        {RESTORED: "        yield\n        self.synchronises = before\n"},
        {"accumulation": "outside after an exception inside no_sync(), the gradient of"},
    ),
    "an inner no_sync switches it on": (
        {"            self.synchronises = before": "            self.synchronises = True"},
        {"accumulation": "inside no_sync() after an inner no_sync() has ended, a micro-batch sends"},
    ),
    "skips what this rank has not used": (
        {
            "zip(trained, used.tolist(), strict=True) if anywhere]": "zip(trained, used.tolist(), strict=True)\n"
            "                if parameter.grad is not None]"
        },
        {"unused": "the gradient of heads.0.weight is not the mean over the ranks"},
    ),
    "zeros where no rank has a gradient": (
        {"used.tolist(), strict=True) if anywhere]": "used.tolist(), strict=True)]"},
        {"unused": "has a gradient, although no rank has used it"},
    ),
    "frozen parameters travel too": (
        {
            "[parameter for parameter in self.module.parameters() if parameter.requires_grad]": (
                "list(self.module.parameters())"
            ),
            "used.tolist(), strict=True) if anywhere]": (
                "used.tolist(), strict=True) if anywhere or not parameter.requires_grad]"
            ),
        },
        {"frozen": "has a gradient"},
    ),
    "rank 0 makes one call more": (
        {SEND: SEND + "        if dist.get_rank() == 0:\n            dist.barrier()\n"},
        {"value": "rank 0 waits in vain at my_ddp.py, line 43: `dist.barrier()`; rank 1 waits in vain, outside of"},
    ),
    "rank 1 never returns": (
        {SEND: SEND + "        __import__('time').sleep(99 * (dist.get_rank() == 1))\n"},
        {"value": "rank 1 did not answer in time"},
    ),
    "one rank raises": (
        {SEND: "        if dist.get_rank() == 2:\n            raise KeyError('lost')\n" + SEND},
        {"value": "rank 2 raises KeyError: 'lost' (my_ddp.py, line "},
    ),
}
ONLY_VALUE = {"rank 0 makes one call more", "rank 1 never returns", "one rank raises"}  # would fail in most
NOT_ON_RANKS = {  # file: words
    "": "my_ddp.py defines no class MyDDP yet",
    "def MyDDP(:": "my_ddp.py can't be imported: raises SyntaxError",
    "MyDDP = 3": "MyDDP is not a class that inherits from torch.nn.Module",
    "from torch import nn\nclass MyDDP(nn.Module):\n    def forward(self): pass": "MyDDP has no no_sync()",
    "while True: pass": "my_ddp.py can't be imported: that takes longer than 1 seconds, or ends the process",
}
BORROWED = {
    "from scratch_ddp import BucketedDDP as MyDDP": "my_ddp.py uses MyDDP of scratch_ddp.ddp.bucketed",
    "import scratch_ddp\nclass MyDDP(scratch_ddp.FlatDDP): pass": "my_ddp.py uses scratch_ddp of scratch_ddp",
    "from torch import nn\nclass MyDDP(nn.parallel.DistributedDataParallel):\n"
    "    def sync_gradients(self): pass": "uses DistributedDataParallel of torch.nn.parallel",
}
