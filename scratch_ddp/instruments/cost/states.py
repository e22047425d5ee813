"""The bytes that a rank holds for a model's states and sends in a step: DDP and the three stages of ZeRO.

Source: S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020, sections 5 (memory) and 7 (communication). Activations and the library's own buffers are extra.
"""

from dataclasses import dataclass, fields

import torch

STAGES = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3")
STATE_ELEMENTS = {"SGD": 0, "SGD with momentum": 1, "Adam": 2, "AdamW": 2}  # optimizer state per parameter


@dataclass(frozen=True)
class Precision:
    """Bytes per element. `master`: of the wide copy of narrow weights, 0 without one.

    `sent`: of weights on the wire; `reduced`: of gradients on the wire.
    """

    weights: int
    gradients: int
    master: int
    state: int
    sent: int
    reduced: int


FP32 = Precision(weights=4, gradients=4, master=0, state=4, sent=4, reduced=4)
MIXED = Precision(weights=2, gradients=2, master=4, state=4, sent=2, reduced=2)  # the paper's: 2 + 2 + 12 under Adam
WIDE_GRADIENTS = Precision(weights=2, gradients=4, master=4, state=4, sent=2, reduced=4)  # as Llama 3's
BF16_COMPUTE = Precision(weights=4, gradients=4, master=0, state=4, sent=2, reduced=2)  # FSDP: narrow for computing


@dataclass(frozen=True)
class ModelStates:
    """Bytes that one rank holds, by purpose."""

    weights: float
    gradients: float
    master: float
    optimizer: float
    gathered: float = 0.0  # ZeRO-3, temporarily: whole weights and gradients of the part that computes

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def model_states(
    parameters: int,
    ranks: int,
    stage: str,
    optimizer: str = "AdamW",
    precision: Precision = FP32,
    gathered: int = 0,
) -> ModelStates:
    """Bytes that a rank holds between backward and step, as the average over ranks.

    Each stage shards more than the one before: ZeRO-1 the optimizer state and the master weights, ZeRO-2 the gradients
    too, ZeRO-3 the weights too. `gathered`: under ZeRO-3, how many parameters are whole at the same time, with their
    gradients, in the precision in which they are sent. Raises ValueError for a stage not in STAGES, an optimizer not in
    STATE_ELEMENTS, and impossible numbers of ranks or parameters.
    """
    _check(parameters, ranks, stage)
    if optimizer not in STATE_ELEMENTS:
        raise ValueError(f"optimizer: {optimizer!r}; allowed are {', '.join(STATE_ELEMENTS)}")
    if gathered and stage != "ZeRO-3":
        raise ValueError(f"under {stage} all parameters are whole all the time: gathered must be 0")
    level = STAGES.index(stage)
    share = parameters / ranks
    return ModelStates(
        weights=precision.weights * (share if level >= 3 else parameters),
        gradients=precision.gradients * (share if level >= 2 else parameters),
        master=precision.master * (share if level >= 1 else parameters),
        optimizer=precision.state * STATE_ELEMENTS[optimizer] * (share if level >= 1 else parameters),
        gathered=(precision.sent + precision.reduced) * gathered,
    )


def bytes_sent(
    parameters: int,
    ranks: int,
    stage: str,
    precision: Precision = FP32,
    free_after_forward: bool = True,
    reduce_scatters: bool = True,
) -> float:
    """Bytes that a rank sends per step on a ring, as the average over ranks: a multiple of (n - 1)/n of all bytes.

    DDP all-reduces the gradients: 2 times. ZeRO-1 and ZeRO-2 reduce-scatter them and send the weights: 2 times, too;
    ZeRO-1 after an all-reduce (`reduce_scatters` False) 3 times. ZeRO-3 gathers the weights in forward, again in
    backward if it freed them in between, and reduce-scatters the gradients: 3 times. With several micro-batches ZeRO-2
    sends gradients, and ZeRO-3 everything, for each; the others once a step. Raises ValueError as `model_states` does.
    """
    _check(parameters, ranks, stage)
    weights = {"DDP": 0, "ZeRO-3": 2 if free_after_forward else 1}.get(stage, 1)
    gradients = 2 if stage == "DDP" or (stage == "ZeRO-1" and not reduce_scatters) else 1
    return (weights * precision.sent + gradients * precision.reduced) * parameters * (ranks - 1) / ranks


def measured_states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> ModelStates:
    """Bytes that this rank's tensors take. A storage that several tensors share counts once. No communication.

    Master weights in an optimizer's state count as optimizer state.
    """
    parameters = list(model.parameters())
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
    return ModelStates(
        weights=_storage_bytes(parameters),
        gradients=_storage_bytes([parameter.grad for parameter in parameters if parameter.grad is not None]),
        master=0,
        optimizer=_storage_bytes(state),
    )


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {(tensor.device, tensor.untyped_storage().data_ptr()): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _check(parameters: int, ranks: int, stage: str) -> None:
    if stage not in STAGES:
        raise ValueError(f"stage: {stage!r}; allowed are {', '.join(STAGES)}")
    if ranks < 1 or parameters < 0:
        raise ValueError(f"there must be at least 1 rank and 0 parameters, not {ranks} and {parameters}")
