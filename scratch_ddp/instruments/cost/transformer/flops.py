"""Operations of a training step, how well a GPU is used, and what a whole training takes in time and money.

Sources: J. Kaplan et al., "Scaling Laws for Neural Language Models", 2020 (6 N operations a token); A. Chowdhery
et al., "PaLM", 2022, appendix B (the attention's, and utilisation); S. McCandlish et al., "An Empirical Model of
Large-Batch Training", 2018 (what a larger batch costs).
"""

from dataclasses import dataclass

from scratch_ddp.instruments.cost.transformer.shape import ModelShape
from scratch_ddp.instruments.cost.wire import refuse_unless_finite

_HOUR, _DAY = 3600, 86400


def forward_flops_of_block(shape: ModelShape, sequence: int) -> float:
    """Operations of a block's forward for a token: two for each weight, and the attention's for each token it sees.

    The attention's are counted as if each token saw the whole `sequence`. A causal one may leave out half of them.
    """
    seen = 4 * sequence * shape.heads * shape.head_width
    return 2 * (shape.block - shape.norms) + seen


def forward_flops_of_head(shape: ModelShape) -> float:
    """Operations of the head's forward for a token. The embedding only looks up."""
    return 2 * shape.head


def flops_per_token(shape: ModelShape, sequence: int, recomputes: bool = False) -> float:
    """Operations of forward and backward for a token of a sequence: the backward takes two forwards.

    About 6 N for N parameters, and 12 · blocks · width · sequence. Of a mixture only the active experts count.
    `recomputes`: with checkpointing each block's forward is done twice, which is work but no progress.
    """
    outside = shape.embedding + shape.head * (not shape.tied) + shape.last_norm
    matrices = shape.active_parameters - outside - shape.blocks * shape.norms
    seen = 4 * sequence * shape.blocks * shape.heads * shape.head_width
    return (4 if recomputes else 3) * (2 * matrices + seen) + 3 * forward_flops_of_head(shape)


def utilisation(flops_per_token: float, tokens_per_second: float, devices: int, peak: float) -> float:
    """The share of the devices' peak that a training reaches (MFU): its operations a second over all of theirs."""
    if devices < 1:
        raise ValueError(f"there must be at least 1 device, not {devices}")
    return flops_per_token * tokens_per_second / (devices * peak)


@dataclass(frozen=True)
class Training:
    """What a whole training takes."""

    seconds: float
    device_hours: float
    money: float

    @property
    def days(self) -> float:
        return self.seconds / _DAY


def training(flops: float, devices: int, peak: float, utilisation: float, price_per_hour: float = 0.0) -> Training:
    """Time and money for `flops` operations in all, on devices of `peak` operations a second that reach `utilisation`.

    Raises ValueError for no device, and for a utilisation that is not above 0 and at most 1.
    """
    refuse_unless_finite(flops=flops, price_per_hour=price_per_hour)
    if devices < 1:
        raise ValueError(f"there must be at least 1 device, not {devices}")
    if not 0 < utilisation <= 1:
        raise ValueError(f"utilisation must be above 0 and at most 1, not {utilisation!r}")
    seconds = flops / (devices * peak * utilisation)
    hours = devices * seconds / _HOUR
    return Training(seconds, hours, hours * price_per_hour)


def batch_trade(batch: float, critical: float) -> tuple[float, float]:
    """How many times the least steps, and the least tokens, a training takes with this global batch.

    `critical`: the batch at which it takes twice the least of both: where twice the devices no longer halve the steps.
    It grows during training, and has to be measured. Raises ValueError unless both are above 0.
    """
    if not (batch > 0 and critical > 0):
        raise ValueError(f"batches must be more than 0 tokens, not {batch!r} and {critical!r}")
    return 1 + critical / batch, 1 + batch / critical
