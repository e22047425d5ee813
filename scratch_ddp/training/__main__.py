"""Train on sentence pairs, in one process or on several ranks, with the same code.

    python -m scratch_ddp.training
    torchrun --nproc-per-node 2 -m scratch_ddp.training --strategy bucketed

Both see the same global batches, and so the same losses. With `--checkpoints FOLDER` a run that was interrupted goes on
where it was saved last, also on another number of ranks; SIGTERM makes it save and leave.
"""

import argparse
import json
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Optimizer

from scratch_ddp.common.agreement import gather_texts, together
from scratch_ddp.ddp import BucketedDDP, FlatDDP, OverlappedDDP, SimpleDistributedDataParallelism
from scratch_ddp.fsdp import FSDP
from scratch_ddp.instruments.sizes import count
from scratch_ddp.training import Batches, evaluate, load_model, load_pairs, sentences, tokenise, train
from scratch_ddp.training.checkpoints import Checkpoints
from scratch_ddp.training.data import Batch, print_once
from scratch_ddp.training.loop import History
from scratch_ddp.zero import ShardedOptimizer

WRAPPERS = {
    "simple": SimpleDistributedDataParallelism,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    "bucketed": BucketedDDP,
    "torch": nn.parallel.DistributedDataParallel,
    "zero": BucketedDDP,  # and a sharded optimizer
    "fsdp": FSDP,
}
DECISIVE = ("data", "model", "epochs", "batch_size", "lr", "dtype")  # for losses


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scratch_ddp.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategy", choices=WRAPPERS, default="simple", help="used with more than one rank")
    parser.add_argument("--data", help="hub (MRPC), built-in (default), or a folder")
    parser.add_argument("--model", help="hub (SmolLM2), built-in (default), or a folder")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is a GPU per rank")
    parser.add_argument("--epochs", type=count, default=8)
    parser.add_argument("--batch-size", type=count, default=16, help="items per step, over all ranks")
    parser.add_argument("--lr", type=float, help="default: 1e-3 for a small model, 2e-5 for a large one")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="where to save, and to go on from")
    parser.add_argument("--every", type=count, default=50, help="steps from one checkpoint to the next (default: 50)")
    parser.add_argument("--step-log", type=Path, metavar="FILE", help="append each step's loss and items, as JSON")
    timeout = {"metavar": "SECONDS", "type": lambda text: timedelta(seconds=count(text))}
    parser.add_argument("--timeout", **timeout, help="how long a rank waits for others (default: torch's)")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    device = choose_device(options.device)
    if "RANK" in os.environ:  # torchrun's
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=options.timeout)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run(options, device)
    except (ValueError, OSError) as error:  # data, model, or sizes that don't fit: the message says it all
        raise SystemExit(f"scratch_ddp.training: {error}" if dist.get_rank() == 0 else 1) from None
    finally:
        dist.destroy_process_group()


def choose_device(wanted: str | None) -> torch.device:
    """A GPU for this rank alone if there is one for each rank of this machine; otherwise the CPU."""
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if wanted == "cpu" or (wanted is None and torch.cuda.device_count() < local_ranks):
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def run(options: argparse.Namespace, device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > 1:  # after each restart there may be fewer
        hosts = int(os.environ.get("GROUP_WORLD_SIZE", 1))
        print_once(f"{world_size} ranks on {hosts} host{'s' if hosts > 1 else ''}, {device.type}")
    with together(None):
        pairs = load_pairs(options.data)
        torch.manual_seed(0)  # the same on every rank: the model's new weights come from it
        texts, dtype = sentences(pairs["train"]), getattr(torch, options.dtype)
        model, tokenizer = load_model(options.model, texts=texts, dtype=dtype)
        if options.checkpoints and rank == 0:
            options.checkpoints.mkdir(parents=True, exist_ok=True)
    model, optimizer = wrap(model.to(device), options, world_size)

    def share(split: str, seed: int | None = None) -> Batches:
        items = tokenise(pairs[split], tokenizer)
        return Batches(items, options.batch_size, tokenizer.pad_token_id, rank, world_size, seed=seed)

    history, checkpoints = History(), None
    if options.checkpoints:
        settings = {name: getattr(options, name) for name in DECISIVE}
        checkpoints = Checkpoints(model, optimizer, settings, options.checkpoints, options.every, options.timeout)
        history = checkpoints.resume()

    def after_step(batch: Batch, history: History) -> None:
        if options.step_log:
            log_step(options.step_log, batch, history)
        if checkpoints:
            checkpoints.after_step(history)

    began, resumed_at = time.perf_counter(), len(history.losses)
    parts = {"optimizer": optimizer, "validation": share("validation"), "report": print_once, "history": history}
    train(model, share("train", seed=0), options.epochs, after_step=after_step, **parts)
    if checkpoints:
        checkpoints.save(history)
        checkpoints.finish()
    took = time.perf_counter() - began
    score = evaluate(model, share("test" if "test" in pairs else "validation"))
    who = "1 process" if world_size == 1 else f"{world_size} ranks"
    print_once(f"{who} on {device.type}: {len(history.losses) - resumed_at} steps in {took:.1f} s; test {score}")


def wrap(model: nn.Module, options: argparse.Namespace, world_size: int) -> tuple[nn.Module, Optimizer]:
    """Return the model in its strategy's wrapper, or as it is for one process, and its optimizer."""
    lr = options.lr if options.lr is not None else 1e-3 if sum(p.numel() for p in model.parameters()) < 10e6 else 2e-5
    settings = {"lr": lr, "weight_decay": 0.01}
    if world_size > 1:
        model = WRAPPERS[options.strategy](model)
        if options.strategy == "zero":
            return model, ShardedOptimizer(model.parameters(), AdamW, **settings)
    return model, AdamW(model.parameters(), **settings)


def log_step(path: Path, batch: Batch, history: History) -> None:
    """Append a line of JSON for the step that has just ended: step, loss, items, ranks, time. The first rank writes.

    Costs two all-gathers of a few bytes per item.
    """
    items = [json.loads(text) for text in gather_texts(json.dumps(batch.numbers))]
    if dist.get_rank() == 0:
        line = {"step": len(history.losses), "loss": history.losses[-1], "items": sorted(sum(items, []))}
        with open(path, "a") as file:
            file.write(json.dumps(line | {"ranks": len(items), "time": time.time()}) + "\n")


def read_steps(path: str | os.PathLike) -> dict[int, dict]:
    """Return {step: its line in the log}; the last one of a step that was repeated, and none that was cut short."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines() if line.endswith("}")]
    return {line["step"]: line for line in lines}


if __name__ == "__main__":
    main()
