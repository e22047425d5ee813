"""Train on sentence pairs, in one process or on several ranks, with the same code.

    python -m scratch_ddp.training
    torchrun --nproc-per-node 2 -m scratch_ddp.training --strategy bucketed

Both see the same global batches, and so the same losses.
"""

import argparse
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from scratch_ddp.ddp import BucketedDDP, FlatDDP, OverlappedDDP, SimpleDistributedDataParallelism
from scratch_ddp.fsdp import FSDP
from scratch_ddp.training import Batches, evaluate, load_model, load_pairs, seed_everything, sentences, tokenise, train
from scratch_ddp.training.data import KINDS, SHORTEST
from scratch_ddp.zero import ShardedOptimizer

WEIGHT_DECAY = 0.01
WRAPPERS = {
    "simple": SimpleDistributedDataParallelism,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": BucketedDDP,
    "torch": torch.nn.parallel.DistributedDataParallel,
    "zero": BucketedDDP,  # and a sharded optimizer
    "fsdp": FSDP,
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scratch_ddp.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", choices=WRAPPERS, default="simple", help="used with more than one rank")
    parser.add_argument("--data", help="hub, built-in, or a folder (default: SCRATCH_DDP_DATA, else what works)")
    parser.add_argument("--model", help="hub, built-in, or a folder (default: SCRATCH_DDP_MODEL, else what works)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU per rank")
    parser.add_argument("--epochs", type=count, default=8)
    parser.add_argument("--batch-size", type=count, default=16, help="items per micro-batch, over all ranks")
    parser.add_argument("--accumulation", type=count, default=1, help="micro-batches per optimizer step")
    parser.add_argument(
        "--lr", type=learning_rate, help="learning rate (default: 1e-3 for a small model, 2e-5 for a large one)"
    )
    parser.add_argument("--shards", choices=KINDS, default=KINDS[0])
    parser.add_argument("--max-length", type=length, default=256, help="most tokens of a pair")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def count(text: str, least: int = 1) -> int:
    """`type=` of an option: a whole number. argparse refuses others with status 2, before anything is loaded."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"a whole number, {least} or more, is needed, not {text!r}")
    return int(text)


def length(text: str) -> int:
    return count(text, SHORTEST)


def learning_rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"a number, 0 or more, is needed, not {text!r}")
    return value


def choose_device(wanted: str | None) -> torch.device:
    """A GPU for this rank alone if there is one for each rank of this machine; otherwise the CPU."""
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if wanted == "cpu" or (wanted is None and torch.cuda.device_count() < local_ranks):
        return torch.device("cpu")
    if torch.cuda.device_count() < local_ranks:
        raise SystemExit(f"--device cuda: {torch.cuda.device_count()} GPUs for {local_ranks} ranks")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


@contextmanager
def ranks(device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield (rank, world size). Under torchrun, its process group exists inside the block."""
    if "RANK" not in os.environ:
        yield 0, 1
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def main() -> None:
    options = arguments()
    device = choose_device(options.device)
    with ranks(device) as (rank, world_size):
        try:
            run(options, device, rank, world_size)
        except ValueError as error:  # data, model, or sizes that don't fit: the message says it all
            raise SystemExit(f"scratch_ddp.training: {error}" if rank == 0 else 1) from None


def run(options: argparse.Namespace, device: torch.device, rank: int, world_size: int) -> None:
    pairs = load_pairs(options.data)
    seed_everything(options.seed)  # the same on every rank: the model's new weights come from it
    model, tokenizer = load_model(options.model, texts=sentences(pairs["train"]))
    model.to(device)
    lr = options.lr if options.lr is not None else 1e-3 if sum(p.numel() for p in model.parameters()) < 10e6 else 2e-5
    optimizer = None  # that of `train`
    if world_size > 1:
        model = WRAPPERS[options.strategy](model)
        if options.strategy == "zero":
            optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=lr, weight_decay=WEIGHT_DECAY)

    def share(split: str, seed: int | None = None) -> Batches:
        items, pad = tokenise(pairs[split], tokenizer, options.max_length), tokenizer.pad_token_id
        return Batches(items, options.batch_size, pad, rank, world_size, options.shards, seed)

    report = print if rank == 0 else None
    began = time.perf_counter()
    history = train(
        model,
        share("train", options.seed),
        epochs=options.epochs,
        lr=lr,
        weight_decay=WEIGHT_DECAY,
        optimizer=optimizer,
        accumulation=options.accumulation,
        validation=share("validation"),
        report=report,
    )
    seconds = time.perf_counter() - began
    score = evaluate(model, share("test" if "test" in pairs else "validation"))
    if rank == 0:
        who = "1 process" if world_size == 1 else f"{world_size} ranks"
        print(f"{who} on {device.type}: {len(history.losses)} steps in {seconds:.1f} s; test {score}")


if __name__ == "__main__":
    main()
