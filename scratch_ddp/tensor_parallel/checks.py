"""What is checked before anything is sliced or sent: a mistake on any rank is the same error on every rank."""

import hashlib
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import (
    check_same_lines,
    compare,
    digest,
    gather_texts,
    raise_everywhere,
    rank_numbers,
    texts_by_rank,
)
from scratch_ddp.common.replicas import tensor_problem
from scratch_ddp.common.tensors import bytes_of
from scratch_ddp.common.wrapper import process_group

T = TypeVar("T")
DIFFERENT = "the ranks slice different tensors: hold the same values on every rank first (one seed, one checkpoint)"


# Of one rank.


def check_plain(layer: type, plain: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError unless `layer` can be made of `plain` on this rank. No communication."""
    if not isinstance(plain, layer.made_of):
        kind = layer.made_of.__name__
        raise ValueError(f"{layer.__name__} is made of a torch.nn.{kind}, not of a {type(plain).__name__}")
    for option in ("sparse", "max_norm", "scale_grad_by_freq"):
        if getattr(plain, option, None):
            raise ValueError(f"an embedding with {option}={getattr(plain, option)!r} can't be sliced")
    n, backends = dist.get_world_size(group), dist.get_backend_config(group)
    for name, parameter in plain.named_parameters(recurse=False):
        if problem := tensor_problem(name, parameter, backends):
            raise ValueError(problem)
        if name in layer.cuts:
            check_multiple(f"the {_SLICED[layer.made_of, layer.cuts[name]]}", parameter.shape[layer.cuts[name]], n)


_SLICED = {(nn.Linear, 0): "outputs", (nn.Linear, 1): "inputs", (nn.Embedding, 0): "rows of the vocabulary"}


def check_multiple(what: str, count: int, n: int, fixed: bool = False) -> None:
    """Raise ValueError unless n ranks can hold equally many of `what`, such as "the outputs".

    fixed: their number depends on others, so the message suggests no other one.
    """
    if count % n:
        words = what.split(maxsplit=1)
        below, above = count // n * n, (count // n + 1) * n
        others = "" if fixed else f"{f'{below} or {above}' if below else above} could be, or "
        raise ValueError(
            f"{words[0]} {count} {words[1]} can't be shared evenly by {n} ranks: {others}take a number of ranks that "
            f"divides {count}"
        )


def check_one_of(what: str, value: object, allowed: Collection) -> None:
    """Raise ValueError unless `value` is allowed."""
    if value not in allowed:
        raise ValueError(f"{what} is {value!r}; allowed are {', '.join(map(repr, allowed))}")


# Of all ranks.


def agree_on_layer(layer: type[T], plain: nn.Module, group: Any = None, **options: Any) -> T:
    """Return layer(plain, group, **options): this rank's part of a plain layer, which stays as it is.

    Raises ValueError on every rank if n ranks can't hold equal slices, or if `plain` or the options are not the same on
    all of them. Costs two small all-reduces, and reads the parameters once.
    """
    group = process_group(group)
    made = on_every_rank(lambda: layer(plain, group, **options), group)
    settings = f"{layer.__name__} with {options or 'no options'}"
    check_same_lines([settings, *values_of(plain.named_parameters())], DIFFERENT, group)
    return made


def on_every_rank(do: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """Call `do`, which sends nothing, on every rank and return what it returns here.

    Raises ValueError on every rank if it raises ValueError or TypeError on one. One all-reduce of one byte.
    """
    result = problem = None
    try:
        result = do()
    except (TypeError, ValueError) as error:
        problem = str(error)
    raise_everywhere(problem, group)
    return result


def values_of(named: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """A line for each tensor with dtype, shape and a digest of its bits. Reads all of it once."""
    return [f"{name}: {tensor.dtype} {tuple(tensor.shape)} with values {_hash(tensor)}" for name, tensor in named]


def check_tokens(
    what: str, ids: torch.Tensor, vocabulary: int, group: dist.ProcessGroup | None, ignored: int | None = None
) -> None:
    """Raise ValueError on every rank unless all ranks hold the same ids, all of them in the vocabulary or `ignored`.

    One all-reduce of three numbers, counted as set-up. The ids are read on the processor.
    """
    line = f"{ids.dtype} {tuple(ids.shape)}, the first of them {ids.flatten()[:4].tolist()}, digest {_hash(ids)}"
    problem = _token_problem(what, ids, vocabulary, ignored)
    found = compare(group, {"line": digest([line])}, {"problem": problem is not None})
    if found.largest["problem"]:
        raise_everywhere(problem, group)
    if found.different:
        complaint = "all ranks of a tensor-parallel group work on the same tokens, but these were given different ones"
        with set_up():
            lines = dict(zip(rank_numbers(group), gather_texts(line, group), strict=True))
        raise ValueError("\n".join([f"{complaint}: {what}", *texts_by_rank(lines)]))


def _token_problem(what: str, ids: torch.Tensor, vocabulary: int, ignored: int | None) -> str | None:
    if ids.dtype not in (torch.int64, torch.int32):
        return f"{what} must be int64, not {ids.dtype}"
    counted = ids if ignored is None else ids[ids != ignored]
    if counted.numel():
        low, high = (each.item() for each in counted.aminmax())
        if low < 0 or high >= vocabulary:
            return (
                f"{what} reach from {low} to {high}, but the vocabulary has {vocabulary} entries, 0 to {vocabulary - 1}"
            )
    return None


def _hash(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor).cpu().numpy()).hexdigest()[:12]
