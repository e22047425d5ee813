"""Where the ranks run: on which GPU each, or on the CPU, and over which backend they talk."""

import os
from dataclasses import dataclass

from scratch_ddp.cells.words import ClusterError

INTERRUPTIBLE = "interruptible"  # `interruptible_group.BACKEND`, whose module imports torch; the kernel does not


@dataclass(frozen=True)
class Placement:
    """`gpus[rank]` is the rank's GPU, None for the CPU; `why` says it in one line, with the reason."""

    backend: str
    gpus: list[int | None]
    why: str


def place(world_size: int, gpu_count: int, gpu_ids: str | None, device: str | None, backend: str | None) -> Placement:
    """Choose for `world_size` ranks on a machine with `gpu_count` GPUs. Raises ClusterError."""
    if device == "cpu" and gpu_ids is not None:
        raise ClusterError("--device cpu and --gpu-ids contradict each other: leave one of them out.")
    listed = _listed_gpus(gpu_ids, gpu_count)
    if device == "cuda" and not listed:
        raise ClusterError("--device cuda: torch finds no GPU here. Leave the option out to run on the CPU.")
    if device == "cpu" or not listed:
        if backend == "nccl":
            raise ClusterError("--backend nccl needs a GPU for each rank. Leave it out: on the CPU ranks use gloo.")
        reason = "there is no GPU here" if not gpu_count else "--device cpu"
        return Placement(backend or INTERRUPTIBLE, [None] * world_size, f"on the CPU ({reason}), over gloo")
    gpus = [listed[rank % len(listed)] for rank in range(world_size)]
    if len(listed) >= world_size:
        chosen = backend or "nccl"
        named = ", ".join(f"rank {rank} on GPU {gpu}" for rank, gpu in enumerate(gpus))
        return Placement(chosen, gpus, f"{named}, over {'nccl' if chosen == 'nccl' else 'gloo'}")
    if backend == "nccl":
        raise ClusterError(
            f"--backend nccl: {world_size} ranks but {len(listed)} GPU(s), and NCCL refuses two ranks on one GPU. "
            f"Start {len(listed)} rank(s), or leave --backend out to use gloo."
        )
    shared = f"{len(listed)} GPU(s) shared in turn by {world_size} ranks"
    return Placement(backend or INTERRUPTIBLE, gpus, f"{shared}, over gloo (NCCL refuses two ranks on one GPU)")


def _listed_gpus(gpu_ids: str | None, gpu_count: int) -> list[int]:
    if gpu_ids is None:
        return list(range(gpu_count))
    try:
        listed = [int(part) for part in gpu_ids.split(",")]
    except ValueError:
        raise ClusterError(f"--gpu-ids {gpu_ids}: not a list of numbers. Write for example --gpu-ids 0,1.") from None
    if not gpu_count:
        raise ClusterError(
            f"--gpu-ids {gpu_ids}: torch finds no GPU on this machine. Leave the option out to run on the CPU."
        )
    unknown = [gpu for gpu in listed if not 0 <= gpu < gpu_count]
    if unknown:
        raise ClusterError(
            f"--gpu-ids {gpu_ids}: there is no GPU {unknown[0]}. This machine has {gpu_count}, numbered from 0."
        )
    if len(set(listed)) < len(listed):
        raise ClusterError(f"--gpu-ids {gpu_ids}: a GPU is listed twice. Name each once; ranks take them in turn.")
    return listed


def overload_warning(world_size: int) -> str | None:
    """Why this many ranks are too many for this machine, or None. They are started anyway."""
    cores = os.cpu_count() or 1
    if world_size > 4 * cores:
        return f"{world_size} ranks share {cores} cores: they will mostly wait for each other"
    return None
