"""The ranks that benchmarks run on, for tests, and what several tests ask of them."""

import contextlib
import io
import os
import random
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from scratch_ddp.instruments.forked_ranks import RankFailed, run_ranks

__all__ = ["RankFailed", "assert_refused", "captured", "in_turn", "message_of", "printed_under_torchrun", "run_ranks"]
Refused = Iterable[tuple[str, Callable[[], object]]]


def captured(function: Callable[[], Any]) -> tuple[Any, str]:
    """What the function returns, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return function(), printed.getvalue()


def printed_under_torchrun(world_size: int, script: Callable[[], Any]) -> list[str]:
    """What each rank prints when the script starts as torchrun starts it: with its variables, and without a group."""
    port = random.randrange(20_000, 32_000)  # below the ports that others get meanwhile
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

    def rank_main() -> None:
        os.environ.update(address)
        dist.barrier()  # a rank that left while another still joins would make that one's joining fail
        dist.destroy_process_group()
        script()

    return [printed for _, printed in run_ranks(world_size, captured, rank_main)]


def in_turn(world_size: int, function: Callable[..., Any], cases: Iterable[tuple], timeout: float = 120) -> list[list]:
    """Each rank's answers to `function(*case)`, one case after the other: starting ranks takes longer than a case."""

    def all_cases() -> list:
        answers = []
        for case in cases:
            try:
                answers.append(function(*case))
            except BaseException as error:
                error.add_note(f"the case is {case}")
                raise
        return answers

    return run_ranks(world_size, all_cases, timeout=timeout)


def message_of(do: Callable[[], object]) -> str:
    """What is said where `do` raises."""
    try:
        do()
    except Exception as error:
        return str(error)
    return "nothing was raised"


def assert_refused(world_size: int, refused: Refused) -> None:
    """Each call raises on every rank, with a message that holds its text, and the ranks go on afterwards."""

    def each_call(text: str, call: Callable[[], object]) -> None:
        said = message_of(call)
        dist.barrier()
        assert text in said, said

    in_turn(world_size, each_call, refused)
