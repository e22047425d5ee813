"""The bytes that a forward saves for its backward, and those of the logits.

What is counted is what torch saves for models of transformers' code: each tensor once, however many operations need it,
with an attention that does not keep its scores (`sdpa`), and norms that compute in float32. `saved_bytes` measures it.
"""

from collections.abc import Callable
from typing import Any

import torch

from scratch_ddp.instruments.cost.transformer.shape import ModelShape

_FLOAT32 = 4


def bytes_per_token(shape: ModelShape, element: int = 2, checkpointing: bool = False, tp: int = 1) -> float:
    """Bytes that a block saves for each token, on each of `tp` ranks that share it (sequence parallelism included).

    `element`: bytes of a number. With `checkpointing` only a block's input is kept. Raises ValueError for a mixture of
    experts: its bytes hang on which experts the tokens choose.
    """
    refuse_mixture(shape, "activations")
    if checkpointing:
        return element * shape.width / tp
    if not shape.heads:
        return element * (shape.width + shape.saved_in_mlp * shape.inner) / tp
    return (_norms(shape, element) + _attention(shape, element) + element * shape.saved_in_mlp * shape.inner) / tp


def _norms(shape: ModelShape, element: int) -> float:
    """Of two norms: their inputs, what normalises them, and the inputs of the matrices behind them."""
    if shape.norm_vectors == 2:  # LayerNorm: mean and deviation
        return 2 * (2 * element * shape.width + 2 * element)
    # RMSNorm: x in float32, x normalised, and that times the weight, which is the input of the matrices
    return 2 * (_FLOAT32 * shape.width + _FLOAT32 + 2 * element * shape.width)


def _attention(shape: ModelShape, element: int) -> float:
    """Queries, keys, values, the output, and a sum of exponentials for each head."""
    query, key = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    return element * (2 * query + 2 * key) + _FLOAT32 * shape.heads


def logits_bytes(shape: ModelShape, tokens: int, tp: int = 1) -> float:
    """Bytes at the loss: the logarithms of the probabilities in float32, and their gradient. 0 without a head."""
    return 2 * _FLOAT32 * shape.vocabulary * tokens / tp


def refuse_mixture(shape: ModelShape, what: str) -> None:
    """Raise ValueError if the shape has a mixture of experts."""
    if shape.experts:
        raise ValueError(f"{shape.name} is a mixture of experts: its {what} can't be forecast here, its parameters can")


def saved_bytes(model: torch.nn.Module, forward: Callable[[], Any]) -> tuple[int, Any]:
    """Return the bytes that `forward()` saves for backward beside the model's own tensors, and what it returned.

    A storage that several operations save counts once. No communication.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    found: dict[int, torch.UntypedStorage] = {}  # kept until the end, so that no address is used twice

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    return sum(storage.nbytes() for storage in found.values()), result
