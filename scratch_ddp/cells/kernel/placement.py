"""Where the ranks run: on which GPU each, or on the CPU, and over which backend they talk."""

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
    listed = gpu_ids.split(",")
    if len(set(listed)) < len(listed) or not set(listed) <= set(map(str, range(gpu_count))):
        raise ClusterError(
            f"--gpu-ids {gpu_ids}: write numbers of the {gpu_count} GPU(s) here, each once, such as 0,1."
        )
    return list(map(int, listed))
