"""What a call of an answer may not change: its arguments, the notebook's names, and settings of the whole process.

A `Guard` remembers them before the call, hides the names with which a notebook answers for its own number of ranks
(`rank`, `world_size`, meshes and groups), and afterwards puts back what it can and says what was changed.
"""

import copy
import gc
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scratch_ddp.course.wording import bits, difference

HIDDEN = ("rank", "world_size")
_missing_now: set[str] = set()  # the errors of an answer that misses what a Guard has removed
_MODULES = (dist, dist.distributed_c10d)
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name in _OF_EVERY_MODULE if name.endswith("_hooks"))

# What an answer may be asked to change, as Guard's `changes`.
VALUES, GRADIENTS, HOOKS, STATE, EVERYTHING = "values", "gradients", "hooks", "state", "everything"


# Settings of the whole process, by name: how they are read and written.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "garbage collection": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    "the thresholds of garbage collection": (gc.get_threshold, lambda thresholds: gc.set_threshold(*thresholds)),
    "the number of threads (torch.set_num_threads)": (torch.get_num_threads, torch.set_num_threads),
    "torch.use_deterministic_algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "torch.set_float32_matmul_precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    "the default device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    "sys.setswitchinterval": (sys.getswitchinterval, sys.setswitchinterval),
}


def settings() -> dict[str, Any]:
    """What is set now: what an operation that an answer calls may find changed."""
    now = {name: read() for name, (read, _) in _SETTINGS.items()}
    now["gradients"] = torch.is_grad_enabled()
    return now | {"inference mode": torch.is_inference_mode_enabled(), "the default dtype": torch.get_default_dtype()}


class Guard:
    """Compares before and after one call.

    known: the arguments, and what else the answer knows, by name. changes: what it may change of that: tensors whose
    values may change (not their shapes or where they lie), VALUES of all tensors, GRADIENTS of trainable parameters,
    HOOKS, an optimizer's STATE, EVERYTHING; or the name of an attribute of a model.
    """

    def __init__(self, function: Callable, known: Mapping[str, Any], changes: Collection[str | torch.Tensor]):
        self._function = function
        self._changes = {each for each in changes if isinstance(each, str)}
        self._may_differ = {id(each) for each in changes if isinstance(each, torch.Tensor)}
        self._names = getattr(function, "__globals__", {})
        self._known = {} if EVERYTHING in self._changes else known
        self._hidden: dict[str, Any] = {}
        self.complaint = ""

    def __enter__(self) -> "Guard":
        self._settings, self._classes = _Settings(), _Classes(self._known.values())
        self._before = list(self._facts())
        self._hidden = {name: value for name, value in self._names.items() if _tells_the_world(name, value)}
        for name in self._hidden:
            del self._names[name]
        self._names_before = dict(self._names)
        self._names.setdefault("hash", _hash_of_this_process)
        self._lengths = {name: len(value) for name, value in self._names.items() if _can_keep(value)}
        self._kept = dict(vars(self._function)) if hasattr(self._function, "__dict__") else {}
        self._defaults = [(default, copy.copy(default)) for default in _defaults(self._function) if _can_keep(default)]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        complaints = [*self._settings.restore(), *self._classes.restore(), *self._restore_names()]
        with torch.no_grad():
            complaints += self._changed()
        self.complaint = next(iter(complaints), "")

    def explained(self, error: str) -> str:
        """`error`, with a word about a name that the answer misses: the notebook's, or what an earlier call left."""
        if error in _missing_now:
            return f"{error}: an earlier call of the function has left it where all calls share it"
        for name in self._hidden:
            if error == f"NameError: name {name!r} is not defined":
                instead = {"rank": ": dist.get_rank() tells", "world_size": ": dist.get_world_size() tells"}
                return f"{error}: it is the notebook's, and the answer must not rely on it{instead.get(name, '')}"
        return error

    def _restore_names(self) -> Iterator[str]:
        if self._names.get("hash") is _hash_of_this_process:
            del self._names["hash"]
        for name in [name for name in self._names if name not in self._names_before]:
            del self._names[name]
            if name != "__warningregistry__":  # Python's own, after a warning
                _missing_now.add(f"NameError: name {name!r} is not defined")
                yield f"leaves the name `{name}` behind in the notebook"
        for name, value in self._names_before.items():
            if self._names.get(name, self) is not value:
                self._names[name] = value
                yield f"changes `{name}`, a name of the notebook"
        self._names.update(self._hidden)
        for name, length in self._lengths.items():
            if len(self._names[name]) != length:
                yield f"keeps something in `{name}`, a name of the notebook"
        if hasattr(self._function, "__dict__") and vars(self._function) != self._kept:
            for name in vars(self._function).keys() - self._kept.keys():
                _missing_now.add(f"AttributeError: 'function' object has no attribute {name!r}")
            vars(self._function).clear()
            vars(self._function).update(self._kept)
            yield "keeps something in an attribute of the function"
        for default, before in self._defaults:
            if _identities(default) != _identities(before):
                default.clear()
                (default.extend if isinstance(default, list) else default.update)(before)
                yield "keeps something in the default value of an argument, which all calls share"

    def _changed(self) -> Iterator[str]:
        for before, now in zip(self._before, self._facts(), strict=False):
            if isinstance(before.value, frozenset) and isinstance(now.value, frozenset):
                yield from _names_changed(before, now)
            elif before.value != now.value:
                yield f"{before.what} {before.complaint or difference(now.value, before.value)}"

    def _facts(self) -> Iterator["_Fact"]:
        seen: set[int] = set()
        for what, thing in self._known.items():
            yield from self._facts_of(what, thing, seen)

    def _facts_of(self, what: str, thing: Any, seen: set[int]) -> Iterator["_Fact"]:
        if isinstance(thing, (bool, int, float, str)):
            yield _Fact(what, thing)
            return
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            yield from self._facts_of_tensor(what, thing)
        elif isinstance(thing, nn.Module):
            yield from self._facts_of_model(thing, seen)
        elif isinstance(thing, torch.optim.Optimizer):
            yield from self._facts_of_optimizer(thing)
        elif isinstance(thing, (list, tuple, dict)):
            pairs = list(thing.items()) if isinstance(thing, dict) else list(enumerate(thing))
            identities = [(key, id(value)) for key, value in pairs]
            yield _Fact(what, identities, "has other entries than before: leave the caller's own as it is")
            for key, value in pairs:
                yield from self._facts_of(f"{what}[{key!r}]", value, seen)

    def _facts_of_tensor(self, what: str, tensor: torch.Tensor) -> Iterator["_Fact"]:
        kept = VALUES not in self._changes and id(tensor) not in self._may_differ
        instead = "the answer must not change it" if kept else "write into it in place"
        lies = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        yield _Fact(what, lies, f"lies in other memory than before, or has another shape: {instead}")
        yield _Fact(f"{what}: requires_grad", tensor.requires_grad)
        if kept:
            values = bits(tensor) if tensor.untyped_storage().nbytes() >= tensor.nbytes else b"freed"
            yield _Fact(what, values, "has other values than before: the answer must not change it")
        if HOOKS not in self._changes and tensor.requires_grad:
            hooks = [tensor._backward_hooks, tensor._post_accumulate_grad_hooks]
            yield _Fact(f"{what}: number of hooks", sum(len(each or ()) for each in hooks))
        if not tensor.is_leaf:
            yield _Fact(f"{what}: retains_grad", tensor.retains_grad)
            return
        if not (GRADIENTS in self._changes and tensor.requires_grad):
            yield _Fact(f"the gradient of {what}", bits(tensor.grad), "is changed, should be left alone")
        has_graph = tensor.grad is not None and tensor.grad.requires_grad
        yield _Fact(f"the gradient of {what}: requires_grad", has_graph)

    def _facts_of_model(self, model: nn.Module, seen: set[int]) -> Iterator["_Fact"]:
        for name, module in model.named_modules():
            parts = {"parameter": module._parameters, "buffer": module._buffers, "module": module._modules}
            names = {
                f"the {kind} {name!r}" for kind, held in parts.items() for name in held if name not in self._changes
            }
            yield _Fact(repr(name) if name else "the model", frozenset(names))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            yield from self._facts_of(repr(name), tensor, seen)
        for name, module in model.named_modules():
            of = repr(name) if name else "the model"
            own = {key: value for key, value in vars(module).items() if key not in self._changes}
            yield _Fact(of, frozenset(f"the attribute {key!r}" for key in own.keys() - _OF_EVERY_MODULE))
            for key, value in own.items():
                if key in _HOOKS and HOOKS not in self._changes:
                    yield _Fact(f"{of}: number of {key}", len(value))
                elif isinstance(value, (bool, int, float, str)) and not key.startswith("_"):
                    yield _Fact(f"{of}: .{key}", value)

    def _facts_of_optimizer(self, optimizer: torch.optim.Optimizer) -> Iterator["_Fact"]:
        yield _Fact("the optimizer: its class", type(optimizer).__name__)
        held = [id(each) for group in optimizer.param_groups for each in group["params"]]
        yield _Fact("the optimizer", held, "has other parameters than before")
        yield from (
            _Fact(f"the optimizer: {key}", optimizer.param_groups[0].get(key)) for key in ("lr", "weight_decay")
        )
        if STATE not in self._changes:
            yield _Fact("the optimizer: entries of its state", sum(map(len, optimizer.state.values())))


@dataclass
class _Fact:
    """Something that must be equal before and after a call. complaint: what is said if not; by default, the values."""

    what: str
    value: Any
    complaint: str = ""


def _names_changed(before: _Fact, now: _Fact) -> Iterator[str]:
    """Complaints about what an answer has left on `what`, or taken from it."""
    yield from (f"leaves {name} on {before.what}" for name in sorted(now.value - before.value))
    yield from (f"removes {name} from {before.what}" for name in sorted(before.value - now.value))


class _Settings:
    """Settings of the whole process that an answer may not leave changed."""

    def __init__(self) -> None:
        self._grad, self._dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        self._anomalies = torch.is_anomaly_enabled()
        self._others = {name: read() for name, (read, _) in _SETTINGS.items()}
        self._random, self._torch_random = random.getstate(), torch.get_rng_state()
        self._functions = [dict(vars(module)) for module in _MODULES]

    def restore(self) -> Iterator[str]:
        if torch.is_grad_enabled() != self._grad:
            torch.set_grad_enabled(self._grad)
            yield f"leaves gradients switched {'off' if self._grad else 'on'} (torch.set_grad_enabled)"
        if torch.get_default_dtype() != self._dtype:
            left = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
            yield f"leaves {left} as the default dtype"
        if torch.is_anomaly_enabled() != self._anomalies:
            torch.autograd.set_detect_anomaly(self._anomalies)
            yield "leaves anomaly detection switched on or off (torch.autograd.set_detect_anomaly)"
        for name, (read, write) in _SETTINGS.items():
            if read() != self._others[name]:
                write(self._others[name])
                yield f"changes a setting of the process and leaves it so: {name}"
        if random.getstate() != self._random or not torch.equal(torch.get_rng_state(), self._torch_random):
            random.setstate(self._random)
            torch.set_rng_state(self._torch_random)
            yield "draws random numbers from the generator that all share"
        for module, before in zip(_MODULES, self._functions, strict=True):
            if vars(module) == before:  # quickly told, and true nearly always
                continue
            changed = [name for name, value in before.items() if vars(module).get(name) is not value]
            for name in (name for name in changed if name != "_group_count"):  # torch names groups by it
                setattr(module, name, before[name])
                if callable(before[name]):
                    yield f"replaces dist.{name}"


class _Classes:
    """The classes of models, which all their models share."""

    def __init__(self, known: Iterable[Any]) -> None:
        modules = (module for thing in known if isinstance(thing, nn.Module) for module in thing.modules())
        classes = {each for kind in {type(module) for module in modules} for each in kind.__mro__}
        self._before = {kind: _attributes(kind) for kind in classes if issubclass(kind, nn.Module)}

    def restore(self) -> Iterator[str]:
        for kind, before in self._before.items():
            now = _attributes(kind)
            for name in now.keys() - before.keys():
                delattr(kind, name)
                yield f"leaves the attribute {name!r} on the class {kind.__name__}"
            for name, value in before.items():
                if now.get(name, self) is not value:
                    setattr(kind, name, value)
                    yield f"changes {name!r} of the class {kind.__name__}"


def _attributes(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("__")}


def _tells_the_world(name: str, value: Any) -> bool:
    """Whether a name of the notebook tells how many ranks there are, or which this is."""
    return name in HIDDEN or isinstance(value, (DeviceMesh, dist.ProcessGroup))


def _hash_of_this_process(value: Any) -> int:
    """As Python's hash() of text and bytes, which differs between processes that were not forked from one."""
    return hash((value, dist.get_rank())) if _holds_text(value) else hash(value)


def _holds_text(value: Any) -> bool:
    parts = value if isinstance(value, (tuple, frozenset)) else ()
    return isinstance(value, (str, bytes)) or any(map(_holds_text, parts))


def _defaults(function: Callable) -> list[Any]:
    by_name = getattr(function, "__kwdefaults__", None) or {}
    return [*(getattr(function, "__defaults__", None) or ()), *by_name.values()]


def _identities(value: list | dict | set) -> list[Any]:
    """Of what it holds; of a dict's values, with their keys."""
    return [(key, id(each)) for key, each in value.items()] if isinstance(value, dict) else [id(each) for each in value]


def _can_keep(value: Any) -> bool:
    return isinstance(value, (list, dict, set)) and not isinstance(value, ModuleType)
