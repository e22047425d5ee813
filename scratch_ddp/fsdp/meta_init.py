"""First values for a model on the meta device, one module at a time: no rank ever holds more of it than its shards.

Every rank draws all random numbers, of every module in the order of `model.modules()`, and keeps its own rows. So the
values are those of one process that uses the same seed, calls `model.to_empty(device=…)` and then `init(module)` in
that order. Where constructors initialise in that order too (layers of torch.nn in a row), they are also the values of
a model that is built as usual.
"""

import collections
import hashlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.common.agreement import check_same_lines, raise_everywhere
from scratch_ddp.fsdp.freed_parameter import allow_reading, refuse_reading
from scratch_ddp.fsdp.shards import Shards

Init = Callable[[nn.Module], object]


def replace_meta(model: nn.Module, device: torch.device) -> None:
    """Put parameters and buffers on `device` in place of those on the meta device.

    Parameters have no memory of their own yet, the buffers' values are not set.
    """
    replaced: dict[torch.Tensor, torch.Tensor] = {}  # what is tied remains tied
    for module in model.modules():
        for name, tensor in list(_own_tensors(module)):
            if not tensor.is_meta:
                continue
            if tensor not in replaced:
                if isinstance(tensor, nn.Parameter):
                    nothing = torch.empty((), dtype=tensor.dtype, device=device).expand(tensor.shape)
                    replaced[tensor] = nn.Parameter(nothing, tensor.requires_grad)
                else:
                    replaced[tensor] = torch.empty_like(tensor, device=device)
            (module._parameters if isinstance(tensor, nn.Parameter) else module._buffers)[name] = replaced[tensor]


def initialise(
    model: nn.Module, unset: set[torch.Tensor], shards: list[Shards], init: Init | None, group: dist.ProcessGroup | None
) -> None:
    """Give values to the `unset` parameters and buffers of the model; of sharded ones, each rank keeps its rows.

    `init` is called with each module that has some of its own; by default its `reset_parameters()` is. Raises
    ValueError on every rank if a module can't be initialised, or leaves values unset, or if the ranks' random numbers
    differ.
    """
    if not unset:
        return
    _check_same_seed(group)
    problem = None
    try:
        _initialise(model, unset, shards, init or _reset)
    except ValueError as error:
        problem = str(error)
    except Exception as error:
        problem = f"init failed: {type(error).__name__}: {error}"
    raise_everywhere(problem, group)


def _initialise(model: nn.Module, unset: set[torch.Tensor], shards: list[Shards], init: Init) -> None:
    places = {parameter: (each, name) for each in shards for name, parameter in each.parameters.items()}
    uses = collections.Counter(tensor for module in model.modules() for _, tensor in _own_tensors(module))
    freed: dict[nn.Parameter, torch.Tensor] = {}  # what parameters were before they were given memory
    for prefix, module in model.named_modules():
        own = {f"{prefix}.{name}".lstrip("."): tensor for name, tensor in _own_tensors(module) if tensor in unset}
        for tensor in own.values():
            if isinstance(tensor, nn.Parameter) and tensor not in freed:
                freed[tensor] = _give_memory(tensor, tensor in places)
        with torch.no_grad():
            for tensor in own.values():
                _mark_unset(tensor)
            if own:
                init(module)
        for name, tensor in own.items():
            _check_set(name, tensor, module)
            uses[tensor] -= 1
            if tensor in places and not uses[tensor]:  # a tied parameter is initialised again with its next module
                _keep_rows(tensor, *places[tensor], freed.pop(tensor))


def _give_memory(parameter: nn.Parameter, sharded: bool) -> torch.Tensor:
    """Give the parameter memory of its own; return what it was before."""
    if sharded:
        allow_reading(parameter)
    before = parameter.data
    parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    return before


def _keep_rows(parameter: nn.Parameter, shards: Shards, name: str, freed: torch.Tensor) -> None:
    """Copy this rank's rows into its shard, and free the parameter."""
    rows = shards.rows[name]
    mine = rows.of_rank(shards.rank)
    whole = parameter.detach().reshape(rows.count, *parameter.shape[1:])
    shards.masters[name].data.copy_(whole[mine.start : mine.stop])
    parameter.data = freed
    refuse_reading(parameter)


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _reset(module: nn.Module) -> None:
    if not callable(getattr(module, "reset_parameters", None)):
        raise ValueError(
            f"a {type(module).__name__} has no reset_parameters(): pass init, a function that is called with each "
            "module that has parameters or buffers of its own, and gives them values"
        )
    module.reset_parameters()


def _mark_unset(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def _check_set(name: str, tensor: torch.Tensor, module: nn.Module) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        unset = tensor.detach().isnan().any()
    else:
        unset = tensor.dtype != torch.bool and (tensor == torch.iinfo(tensor.dtype).min).any()
    if unset:
        raise ValueError(f"{name!r} on the meta device got no values, or NaN, from the init of {type(module).__name__}")


def _check_same_seed(group: dist.ProcessGroup | None) -> None:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    digests = [hashlib.sha256(bytes(state.tolist())).hexdigest()[:12] for state in states]
    check_same_lines(digests, "the ranks' random numbers differ: set the same seed before wrapping the model", group)
