"""The bytes that a rank holds for a model's states, and sends in a step: DDP and the three stages of ZeRO.

Source: S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020, sections 5 (memory) and 7 (communication). The optimizer is Adam, with two float32 a parameter.
"""

from dataclasses import astuple, dataclass

import torch

STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
_ADAM = 2 * 4  # bytes per parameter


@dataclass(frozen=True)
class Precision:
    """Bytes of a weight and of a gradient, held and sent alike. `master`: of a wide copy of the weight."""

    weights: int
    gradients: int
    master: int


FP32 = Precision(weights=4, gradients=4, master=0)
MIXED = Precision(weights=2, gradients=2, master=4)  # the paper's: 2 + 2 + 12 under Adam
WIDE_GRADIENTS = Precision(weights=2, gradients=4, master=4)  # as Llama 3's


@dataclass(frozen=True)
class RankMemory:
    """Bytes that one rank holds. `gathered`: under ZeRO-3, weights and gradients that are whole for a while."""

    weights: float
    gradients: float
    master: float
    optimizer: float
    gathered: float = 0.0
    activations: float = 0.0
    logits: float = 0.0

    @property
    def total(self) -> float:
        return sum(astuple(self))


def model_states(parameters: int, ranks: int, stage: str, precision: Precision = FP32, gathered: int = 0) -> RankMemory:
    """Bytes that a rank holds between backward and step, as the average over ranks. Activations are extra.

    ZeRO-1 shards the optimizer state and the master weights, ZeRO-2 the gradients too, ZeRO-3 the weights too.
    `gathered`: how many parameters are whole at once under ZeRO-3. Raises ValueError for a stage not in STAGES.
    """
    level, share = STAGES.index(stage), parameters / ranks
    return RankMemory(
        weights=precision.weights * (share if level >= 3 else parameters),
        gradients=precision.gradients * (share if level >= 2 else parameters),
        master=precision.master * (share if level >= 1 else parameters),
        optimizer=_ADAM * (share if level >= 1 else parameters),
        gathered=(precision.weights + precision.gradients) * gathered,
    )


def bytes_sent(
    parameters: int, ranks: int, stage: str, precision: Precision = FP32, reduce_scatters: bool = True
) -> float:
    """Bytes that a rank sends per step on a ring, as the average over ranks: a multiple of (n - 1)/n of all bytes.

    DDP: 2 times, ZeRO-1 and ZeRO-2 as well (ZeRO-1 after an all-reduce, without `reduce_scatters`, 3), ZeRO-3: 3 times.
    With several micro-batches ZeRO-2 sends gradients, and ZeRO-3 everything, for each.
    """
    weights = (0, 1, 1, 2)[STAGES.index(stage)]
    gradients = 2 if stage == "DDP" or (stage == "ZeRO-1" and not reduce_scatters) else 1
    return (weights * precision.weights + gradients * precision.gradients) * parameters * (ranks - 1) / ranks


def measured_states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> RankMemory:
    """Bytes that this rank's tensors take. A storage that several tensors share counts once. No communication."""
    parameters = list(model.parameters())
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return RankMemory(_storage_bytes(parameters), _storage_bytes(gradients), 0, _storage_bytes(state))


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]  # of a DTensor, what is here
    return sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in local})
