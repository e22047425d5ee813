"""Lesson 04, seeding checks: are all replicas equal? Asked with one small message."""

import contextlib
import functools
import hashlib
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from scratch_ddp.course.exercise import Exercise
from scratch_ddp.course.inputs.odd_tensors import OddModel
from scratch_ddp.course.inputs.one_process import tried_in_worlds
from scratch_ddp.course.trial import Trial
from scratch_ddp.course.wording import bits
from scratch_ddp.instruments.traffic import ring_bytes
from scratch_ddp.instruments.traffic.calls import METHODS
from scratch_ddp.instruments.traffic.intercept import in_a_call, with_subclasses

DIGEST = 32  # bytes of a SHA-256
MODELS = 64  # that differ in a bit each
ENOUGH = 48  # bits of a message that count: float64 holds 53 of a digest, 15 hexadecimal digits are 60
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.uint8),
)


def same_on_all_ranks(model):
    """Return on every rank whether all ranks' models hold the same bits: True or False.

    The values of all parameters and buffers count, of any shape and dtype, also of buffers that
    `state_dict()` leaves out. Nothing else does: not gradients, flags, attributes or the layout
    in memory, which may have gaps or overlap. Names, shapes and dtypes are equal. There is at least
    one tensor, though perhaps no parameter, or no buffer; none is a lazy view, as of `conj()`. The
    model stays as it is, and every rank makes the call.
    Cost: one dist.all_gather, of 8 to 32 bytes from each rank, each byte of which counts: with
    fewer, or with a weak checksum, different models pass for equal ones.
    """
    world_size = dist.get_world_size()
    # What can 32 bytes say of a whole model?
    # answer: begin
    digest = hashlib.sha256()
    for tensor in [*model.parameters(), *model.buffers()]:
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    mine = torch.tensor(list(digest.digest()), dtype=torch.uint8, device=tensor.device)
    everyones = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(everyones, mine)
    return all(torch.equal(mine, other) for other in everyones)
    # answer: end


class _Model(OddModel):
    """With a few more tensors, on which a difference is hard to see."""

    def __init__(self, device: torch.device):
        super().__init__(device)
        self.register_buffer("codes", torch.tensor(_CODES, dtype=torch.uint8, device=device).view(torch.float8_e5m2))
        self.register_buffer("signed", torch.tensor([-1, 1], dtype=torch.int8, device=device))
        with warnings.catch_warnings():  # torch says once that few operations know this dtype: not in the answer
            warnings.simplefilter("ignore")
            self.register_buffer("half_complex", torch.zeros(2, dtype=torch.complex32, device=device))
        self.inner.register_buffer("hidden", torch.ones(2, device=device), persistent=False)
        self.register_buffer("passing", torch.ones(2, dtype=torch.complex128, device=device), persistent=False)
        with torch.no_grad():
            self.tiny.fill_(2.0)  # unlike `large`, which has the same shape


def _tensors(model: _Model) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def _nudge(model: _Model) -> None:
    number = model.large_double[1]
    model.large_double.data[1] = torch.nextafter(number, torch.full_like(number, torch.inf))  # its ._version stays


def _put(name: str, value: complex, place: Any = 0) -> Callable[[_Model], None]:
    def change(model: _Model) -> None:
        _tensors(model)[name][place] = value

    return change


def _flip(name: str, place: int, pattern: Sequence[int]) -> Callable[[_Model], None]:
    """Flip the bits of `pattern` in the bytes of a tensor, from the byte at `place` on."""

    def change(model: _Model) -> None:
        tensor = _tensors(model)[name]
        flat = tensor.flatten().view(torch.uint8).clone()
        flat[place : place + len(pattern)] ^= torch.tensor(pattern, dtype=torch.uint8, device=flat.device)
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))

    return change


def _reorder(model: _Model) -> None:
    model.transposed.copy_(model.transposed.flip(0))


def _reorder_flags(model: _Model) -> None:
    model.mask.copy_(model.mask.roll(1))


def _exchange(model: _Model) -> None:
    model.large.data, model.tiny.data = model.tiny.data, model.large.data


def _exchange_words(model: _Model) -> None:
    words = model.codes.view(torch.uint8).view(-1, len(_SAME_CRC_32))
    words ^= torch.tensor(_SAME_CRC_32, dtype=torch.uint8, device=words.device)


def _share_memory(model: _Model) -> None:
    """Two parameters lie within a third one, and begin where it does; one comes before it and one after."""
    model.cube.data = torch.arange(6.0, device=model.cube.device).view(2, 1, 3)
    model.vector.data, model.tiny.data = model.cube.data.view(6)[:3], model.cube.data.view(6)[:2]


def _change_the_rest(model: _Model) -> None:
    """What has another layout in memory, or lies beside other numbers there, is the same model."""
    rank = dist.get_rank()
    large = torch.full((4,), float(rank), dtype=model.large_bf16.dtype, device=model.large_bf16.device)
    large[::2] = model.large_bf16
    model.large_bf16.data = large[::2]
    filled = torch.full((rank + 1,), float(rank), device=model.vector.device)
    model.vector.data = torch.cat([filled, model.vector.data])[rank + 1 :]
    if rank % 2:
        model.transposed.data = model.transposed.data.contiguous()
        model.vector.requires_grad_(False)
    model.head.weight.grad = torch.full_like(model.head.weight, rank)
    model.train(rank > 0)
    model.note = torch.tensor(rank)
    model.head.in_features += rank  # print(model) shows it


_TINY = 2.0**-40
_SAME_CRC_32 = (0x41, 0x06, 0x71, 0xDB, 0x01, 0, 0, 0)  # the polynomial: flip these bits, and no remainder is left
# Two words of 8 bytes, in the order of Thue and Morse. If they change places, all sums of numbers, of their squares or
# of anything else that is computed from a number remain, also weighted by a power of the place, up to the 6th.
_WORDS = [[(100 + 7 * byte) ^ flip for byte, flip in enumerate(flips)] for flips in ([0] * 8, _SAME_CRC_32)]
_CODES = [byte for place in range(128) for byte in _WORDS[place.bit_count() % 2]]


@contextlib.contextmanager
def _messages_changed(change: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """What a rank gives to an all-gather is changed in place first, as if it had been another digest."""
    replaced = []

    def wrapped(original: Any, position: int) -> Callable:
        def gather(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()][position]
            if not in_a_call():
                change(given if isinstance(given, torch.Tensor) else given[0])
            return original.__get__(group, type(group))(*args, **kwargs)

        return gather

    for cls in with_subclasses(dist.ProcessGroup):
        for method in METHODS.keys() & vars(cls).keys():
            name, position = METHODS[method]
            if name == "all_gather":
                replaced.append((cls, method, vars(cls)[method]))
                setattr(cls, method, wrapped(vars(cls)[method], position))
    try:
        yield
    finally:
        for each in replaced:
            setattr(*each)


def _swap_two_bytes(message: torch.Tensor, last: bool) -> None:
    """The first two that differ, or the last two: no sum shows it, nor does a part of the digest."""
    flat = message.detach().view(-1).view(torch.uint8)
    numbers = flat.tolist()
    places = range(len(numbers) - 1, -1, -1) if last else range(len(numbers))
    other = next((place for place in places if numbers[place] != numbers[places[0]]), places[0])
    flat[places[0]], flat[other] = numbers[other], numbers[places[0]]


def _digest_of_ones() -> contextlib.AbstractContextManager:
    """Every SHA-256 is NaN for whoever reads it as floating-point numbers."""
    ones = b"\xff" * DIGEST
    fake = mock.Mock(digest=lambda: ones, hexdigest=ones.hex)
    fake.copy = lambda: fake
    return mock.patch.object(hashlib, "sha256", lambda *data, **options: fake)


_Change = Callable[[_Model], None]
_MIDDLE = 123_456


def examine_same_on_all_ranks(trial: Trial) -> None:
    """V and A: equal models, and one difference of each kind. C: one all-gather, of which every byte counts."""
    first, rest = _Model(trial.device), _Model(trial.device)
    # Equal at first, then nudged: whoever keeps its digest gives the old answer.
    _examine_calls(trial, {"equal models, with NaN and inf": (first, True)})
    if trial.rank == trial.size - 1:
        _nudge(first)
    with torch.no_grad():
        _change_the_rest(rest)
    calls = {"the last rank differs in the last bit of a float64": (first, False)}
    if trial.on_all_ranks:
        calls["gradients, flags, attributes and memory layout differ, no value does"] = rest, True
    _examine_calls(trial, calls)
    if not trial.on_all_ranks:  # the rest does not depend on the number of ranks
        return
    trial.end_if_wrong()
    _examine_in_worlds(trial)
    trial.end_if_wrong()
    _examine_messages(trial)


# By what one of two ranks differs in: this rank, and how.
_DIFFERENCES: dict[str, tuple[int, _Change]] = {
    "the order of the same numbers": (1, _reorder),
    "the bits of a NaN": (1, _flip("infinite", 8, [1])),
    "two parameters, which are exchanged": (1, _exchange),
    "a buffer: -0.0, 0.0 elsewhere": (1, _flip("mean", 3, [128])),
    "'passing', a buffer that is not in state_dict(), by i·2⁻⁴⁰": (0, _put("passing", 1 + _TINY * 1j)),
    "'inner.hidden', a part's buffer that is not in state_dict()": (1, _put("inner.hidden", 2.0)),
    "the order of the flags in 'mask', a buffer that is not in state_dict()": (1, _reorder_flags),
    "an int64 of 2⁶⁰, by 1": (1, _flip("steps", 0, [1])),
    "an int8: -2, -1 elsewhere": (1, _put("signed", -2)),  # Python's hash of both is the same
    "the imaginary part of a complex32": (1, _flip("half_complex", 2, [1])),
    "the last of 300,000 numbers, which are frozen": (1, _put("frozen", 1.0, -1)),
    f"number {_MIDDLE:,} of 300,000: -0.0, 0.0 elsewhere": (1, _flip("frozen", 4 * _MIDDLE + 3, [128])),
    "the order of numbers of float8, with the same CRC-32 and the same sums, also weighted by place": (
        1,
        _exchange_words,
    ),
    "'head.bias': equals 'tiny', 'large' elsewhere": (1, _put("head.bias", 2.0, ...)),
    "the last of 'cube', where 'vector', 'cube' and 'tiny' begin at the same place in memory": (
        1,
        _put("cube", 9.0, (1, 0, 2)),
    ),
}


def _two_models(case: str, who: int, change: _Change, device: torch.device) -> list[tuple[_Model]]:
    """By rank. That of rank `who` is changed."""
    models = [_Model(device) for _ in range(2)]
    for model in models:
        if "300,000" in case:
            model.frozen = nn.Parameter(torch.zeros(300_000, device=device), requires_grad=False)
        if "in memory" in case:
            _share_memory(model)
    with torch.no_grad():
        change(models[who])
    return [(model,) for model in models]


def _examine_messages(trial: Trial) -> None:
    """Every byte of the messages counts, and they are compared as bytes. After the other calls."""
    bare, second = "no parameters, rank 1 differs", 1 % trial.size
    blocks: dict[str, Callable[[], contextlib.AbstractContextManager]] = {bare: contextlib.nullcontext}
    blocks["equal models, whose digest is NaN as floats"] = _digest_of_ones
    for place in ("first", "last"):
        exchange = functools.partial(_swap_two_bytes, last=place == "last")
        changed = functools.partial(_messages_changed, exchange) if trial.rank == second else contextlib.nullcontext
        blocks[f"the {place} bytes of rank 1's message are exchanged"] = changed
    models: dict[str, nn.Module] = {case: _Model(trial.device) for case in blocks if case != bare}
    models[bare] = nn.Module()
    for name in ("first", "last"):
        tensor = torch.full((2,), 3.0 if trial.rank == second and name == "last" else 1.0, device=trial.device)
        models[bare].register_buffer(name, tensor)
    block_of = {id(model): blocks[case] for case, model in models.items()}

    def call_inside(answer: Callable, model: nn.Module) -> Any:
        with block_of[id(model)]():
            return answer(model)

    calls = {case: (model, "NaN" in case) for case, model in models.items()}
    _examine_calls(trial, calls, beside=models, using=call_inside)


def _examine_calls(trial: Trial, calls: Mapping[str, tuple[nn.Module, bool]], **options: Any) -> None:
    """V, A and C of calls with these models; the boolean is what is expected."""
    results = trial.call_each({case: (model,) for case, (model, _) in calls.items()}, **options)
    for (_, expected), result in zip(calls.values(), results, strict=True):
        trial.value(result, expected or trial.size == 1)
        trial.agreement(result)
        sent = sum(call.payload for call in trial.calls)
        trial.criterion("digest", f"has {sent} bytes, should have 8 to 32" if sent < 8 else "", "what a rank sends")
        most = ring_bytes("all_gather", DIGEST, trial.size, trial.rank)
        trial.cost(calls={"all_gather": 1}, exactly=True, max_wire_bytes=most)


def _examine_in_worlds(trial: Trial) -> None:
    """V with 2 ranks for each of the differences; with 2 to 9 for one bit of a tensor of any size and dtype, and none.

    And what one rank sends for many models, each of which differs from the others.
    """
    differs, makers = {}, {}
    for difference, (who, change) in _DIFFERENCES.items():
        case = f"rank {who} differs in {difference}"
        differs[case] = True
        makers[case] = functools.partial(_two_models, case, who, change, trial.device)
    for number, dtype in enumerate([*_DTYPES, torch.float32]):
        case = f"{str(dtype).removeprefix('torch.')} {number} drawn with seed {trial.seed}"
        differs[case] = number < len(_DTYPES)
        makers[case] = functools.partial(_drawn_models, trial.seed + number, dtype, differs[case])
    many = f"{MODELS} models, which differ in a bit each, drawn with seed {trial.seed}"
    differs[many], makers[many] = False, functools.partial(_many_models, trial.seed)
    for case, world in tried_in_worlds(trial, makers, using=_one_by_one):
        what = "one rank differs in a bit or in the order: " if differs[case] else "all equal: "
        what = "" if case == many or "drawn" not in case else what
        for rank, results in enumerate(world.results):
            for result in results:
                trial.value(result, not differs[case], f"{world.place} {what}rank {rank}'s result")
        if case == many and world.meetings:  # one rank alone may know without a message
            count = _bits_that_count([b"".join(map(bits, meeting[0].tensors)) for meeting in world.meetings])
            complaint = f"holds {-(-count // 8)} bytes of a digest, from which all others follow; should hold 8 to 32"
            trial.criterion("digest", complaint if count < ENOUGH else "", f"{world.place} what a rank sends")


def _one_by_one(answer: Callable, *models: nn.Module) -> list[Any]:
    return [answer(model) for model in models]


def _many_models(seed: int) -> list[tuple[nn.Module, ...]]:
    """For a rank that is alone: each differs from the others in two bits."""
    content, models = torch.frombuffer(bytearray(random.Random(seed).randbytes(MODELS)), dtype=torch.uint8), []
    for place in range(MODELS):
        mine = content.clone()
        mine[place] ^= 1 << place % 8
        models.append(nn.ParameterList([mine.view(torch.float32)]))
    return [tuple(models)]


def _bits_that_count(messages: list[bytes]) -> int:
    """How many bits of the messages don't follow from others: the rank of the differences, modulo 2."""
    kept: dict[int, int] = {}  # by the highest bit
    for message in messages[1:]:
        rest = int.from_bytes(message, "big") ^ int.from_bytes(messages[0], "big")
        while rest and rest.bit_length() in kept:
            rest ^= kept[rest.bit_length()]
        if rest:
            kept[rest.bit_length()] = rest
    return len(kept)


def _drawn_models(seed: int, dtype: torch.dtype, differ: bool) -> list[tuple[nn.Module]]:
    """A parameter or buffer of drawn dtype and size, between two others and maybe deeper, on each rank."""
    drawn = random.Random(seed)
    n, size = (2, 6, 3, 9, 4)[seed // 3 % 5], int(20_000 ** drawn.random())
    content, models = torch.frombuffer(bytearray(drawn.randbytes(size * dtype.itemsize)), dtype=torch.uint8), []
    guilty = (0, n - 1, drawn.randrange(n))[seed % 3]
    place, bit = drawn.randrange(len(content)), 1 << drawn.randrange(8)
    as_buffer = drawn.random() < 0.5 or not (dtype.is_floating_point or dtype.is_complex)
    for rank in range(n):
        mine = content.clone()
        if differ and rank == guilty:
            if seed % 2 and size > 8:  # the same numbers in another order
                mine = mine.view(size, -1).roll(1, 0).flatten()
            else:
                mine[place] ^= bit
        tensor = mine.view(dtype).view(1, size)
        model, other = nn.Module(), nn.Linear(1, 1)
        nn.init.ones_(other.weight), nn.init.ones_(other.bias)
        if as_buffer:
            model.register_buffer("drawn", tensor, persistent=drawn.random() < 0.5)
        else:
            model.drawn = nn.Parameter(tensor)
        if seed % 2:  # more tensors than a digest has bytes
            model.small = nn.ParameterList(torch.ones(1) for _ in range(40))
        for _ in range(seed // 5 % 4):
            model = nn.Sequential(model)
        models.append((nn.Sequential(*((model, other) if seed // 2 % 2 else (other, model))),))
    return models


SAME_ON_ALL_RANKS = Exercise(
    same_on_all_ranks,
    examine_same_on_all_ranks,
    given="import hashlib",
)
EXERCISES = (SAME_ON_ALL_RANKS,)
