"""Train on sentence pairs, in one process or on several ranks, with the same code.

    python -m scratch_ddp.training
    torchrun --nproc-per-node 2 -m scratch_ddp.training --strategy bucketed

Both see the same global batches, and so the same losses. With `--checkpoints FOLDER` a run that was interrupted goes on
where it was saved last, also on another number of ranks; SIGTERM makes it save and leave.
"""

import argparse
import datetime
import math
import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from scratch_ddp.ddp import BucketedDDP, FlatDDP, OverlappedDDP, SimpleDistributedDataParallelism
from scratch_ddp.fsdp import FSDP
from scratch_ddp.training import Batches, evaluate, load_model, load_pairs, seed_everything, sentences, tokenise, train
from scratch_ddp.training.checkpoints import Checkpoints
from scratch_ddp.training.data import KINDS, SHORTEST
from scratch_ddp.training.loop import History
from scratch_ddp.training.step_log import StepLog
from scratch_ddp.training.stopping import Stopped, StopRequest, exit_status, stop_on_sigterm
from scratch_ddp.zero import ShardedOptimizer

WEIGHT_DECAY = 0.01
EVERY = 50  # steps between two checkpoints, unless told otherwise
LOST_STORE = (
    "torchrun's store would keep the addresses of the old ranks over a restart, and a lost worker would end this job: "
    "start torchrun on every host with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"
)
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
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--checkpoints", type=Path, metavar="FOLDER", help="where to save, and to go on from")
    parser.add_argument("--every", type=count, help=f"steps from one checkpoint to the next (default: {EVERY})")
    parser.add_argument("--step-log", type=Path, metavar="FILE", help="append each step's loss and items, as JSON")
    parser.add_argument("--timeout", type=duration, help="seconds that a rank waits for others (default: torch's)")
    options = parser.parse_args()
    if options.every and not options.checkpoints:
        parser.error("--every says how often to save, so --checkpoints FOLDER is needed too")
    return options


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


def duration(text: str) -> datetime.timedelta:
    return datetime.timedelta(seconds=count(text))


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
def ranks(device: torch.device, timeout: datetime.timedelta | None = None) -> Iterator[tuple[int, int]]:
    """Yield (rank, world size). Under torchrun, its process group exists inside the block."""
    if "RANK" not in os.environ:
        yield 0, 1
        return
    limit = {"timeout": timeout} if timeout else {}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **limit)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def main() -> None:
    options = arguments()
    device = choose_device(options.device)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # of checkpoints of a single process
    wait_for_signal = stop_on_sigterm() if options.checkpoints else nullcontext()
    with wait_for_signal as stop, ranks(device, options.timeout) as (rank, world_size):
        try:
            run(options, device, rank, world_size, stop)
        except Stopped as stopped:
            if rank == 0:
                print(stopped)
            raise SystemExit(exit_status()) from None
        except (ValueError, OSError) as error:  # data, model, or sizes that don't fit: the message says it all
            raise SystemExit(f"scratch_ddp.training: {error}" if rank == 0 else 1) from None


def run(
    options: argparse.Namespace, device: torch.device, rank: int, world_size: int, stop: StopRequest | None = None
) -> None:
    report = print if rank == 0 else None
    if report and loses_its_store():
        report(LOST_STORE)
    if report and world_size > 1:  # after each restart there may be fewer
        hosts = int(os.environ.get("GROUP_WORLD_SIZE", 1))
        report(f"{world_size} ranks on {hosts} host{'s' if hosts > 1 else ''}, {device.type}", flush=True)
    pairs = load_pairs(options.data)
    model, optimizer, tokenizer = build(options, device, world_size, sentences(pairs["train"]))

    def share(split: str, seed: int | None = None) -> Batches:
        items, pad = tokenise(pairs[split], tokenizer, options.max_length), tokenizer.pad_token_id
        return Batches(items, options.batch_size, pad, rank, world_size, options.shards, seed)

    batches, after_step, history, checkpoints = share("train", options.seed), [], History(), None
    if options.step_log:
        after_step.append(StepLog(options.step_log).after_step)
    if options.checkpoints:
        settings = {name: getattr(options, name) for name in ("epochs", "accumulation", "lr", "dtype")}
        settings |= batches.settings()
        checkpoints = Checkpoints(
            options.checkpoints, options.every or EVERY, model, optimizer, settings, stop, report, options.timeout
        )
        history = checkpoints.resume()
        after_step.append(checkpoints.after_step)
    began, resumed_at = time.perf_counter(), history.steps
    train(
        model,
        batches,
        epochs=options.epochs,
        optimizer=optimizer,
        accumulation=options.accumulation,
        validation=share("validation"),
        report=report,
        history=history,
        after_step=lambda *step: [call(*step) for call in after_step],
    )
    if checkpoints:
        checkpoints.save(history)
    seconds = time.perf_counter() - began
    score = evaluate(model, share("test" if "test" in pairs else "validation"))
    if rank == 0:
        who = "1 process" if world_size == 1 else f"{world_size} ranks"
        print(f"{who} on {device.type}: {history.steps - resumed_at} steps in {seconds:.1f} s; test {score}")


def build(
    options: argparse.Namespace, device: torch.device, world_size: int, texts: list[str]
) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
    """Return the model in its strategy's wrapper, its optimizer, and the tokenizer."""
    seed_everything(options.seed)  # the same on every rank: the model's new weights come from it
    model, tokenizer = load_model(options.model, texts=texts, dtype=getattr(torch, options.dtype))
    model.to(device)
    lr = options.lr if options.lr is not None else 1e-3 if sum(p.numel() for p in model.parameters()) < 10e6 else 2e-5
    settings = {"lr": lr, "weight_decay": WEIGHT_DECAY}
    if world_size > 1 or (options.strategy == "fsdp" and "RANK" in os.environ):  # FSDP's checkpoints need FSDP
        model = WRAPPERS[options.strategy](model)
    if world_size > 1 and options.strategy == "zero":
        return model, ShardedOptimizer(model.parameters(), torch.optim.AdamW, **settings), tokenizer
    return model, torch.optim.AdamW(model.parameters(), **settings), tokenizer


def loses_its_store() -> bool:
    """Whether restarted workers would find the old ones' addresses in torchrun's store."""
    several_hosts = int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1
    return several_hosts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


if __name__ == "__main__":
    main()
