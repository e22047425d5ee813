"""Where data and models come from: the hub, a local folder, or the package. Rank 0 decides for all ranks."""

import contextlib
import json
import logging
import os
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from scratch_ddp.common.accounting import set_up
from scratch_ddp.common.agreement import gather_texts, raise_everywhere

T = TypeVar("T")
PATIENCE = 2.5  # seconds that the hub has to answer


@dataclass(frozen=True)
class HubFiles:
    """Files of one repository on the Hugging Face hub, all in the same folder."""

    repository: str
    files: tuple[str, ...]
    kind: str = "model"  # or "dataset"

    def url(self) -> str:
        """The URL of the first file."""
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.repository, self.files[0], repo_type=self.kind)

    def are_cached(self) -> bool:
        """Whether all files are on this machine already."""
        from huggingface_hub import try_to_load_from_cache

        found = [try_to_load_from_cache(self.repository, name, repo_type=self.kind) for name in self.files]
        return all(isinstance(path, str) for path in found)

    def fetch(self) -> Path:
        """Download missing files, and return their folder. Raises ValueError if that fails."""
        from huggingface_hub import hf_hub_download

        offline = self.are_cached()
        if not offline and not answers(self.url()):
            raise ValueError(f"the hub did not answer within {PATIENCE} s, and {self.repository} is not cached")
        try:
            with quiet_hub():
                paths = [
                    hf_hub_download(self.repository, name, repo_type=self.kind, local_files_only=offline)
                    for name in self.files
                ]
        except Exception as error:
            raise ValueError(f"{self.repository} can't be downloaded: {type(error).__name__}") from error
        return Path(paths[0]).parent


@contextlib.contextmanager
def quiet_hub() -> Iterator[None]:
    """Silence the hub client's retry warnings, and its progress bars unless stderr is a terminal."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger, bars = logging.getLogger("huggingface_hub"), not are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            enable_progress_bars()


def answers(url: str, seconds: float = PATIENCE) -> bool:
    """Whether a request for one byte of a file succeeds within `seconds`."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return False
    replies = []

    def ask() -> None:
        request = urllib.request.Request(url, headers={"Range": "bytes=0-0"})
        with contextlib.suppress(Exception), urllib.request.urlopen(request, timeout=seconds) as reply:
            replies.append(reply.read(1))

    thread = threading.Thread(target=ask, daemon=True)  # a name lookup has no timeout of its own
    thread.start()
    thread.join(seconds)
    return bool(replies)


def choose(source: str | None, variable: str, hub: HubFiles) -> tuple[str, str]:
    """Return ("hub", "built-in" or a folder, why), by the argument, else the environment variable, else what works.

    Without either, the hub's files are taken if they are cached or the hub answers within seconds. If the download
    fails all the same, the choice is "built-in". Raises ValueError for a source that is none of the three.
    """
    wanted, why = source or os.environ.get(variable), f"as {'asked' if source else variable + ' says'}"
    if wanted:
        if wanted not in ("hub", "built-in") and not Path(wanted).expanduser().is_dir():
            raise ValueError(f"{wanted!r} is not a folder; allowed are 'hub', 'built-in' and a folder's path ({why})")
        return wanted, why
    if hub.are_cached():
        return "hub", "already on this machine"
    try:
        hub.fetch()
    except ValueError as error:
        return "built-in", str(error)
    return "hub", "downloaded once"


def choose_for_all(
    source: str | None, variable: str, hub: HubFiles, group: dist.ProcessGroup | None = None
) -> tuple[str, str]:
    """`choose` on rank 0, and return its answer on every rank. Raises ValueError on every rank if that fails.

    Costs one all-reduce of 1 byte and two small all-gathers; nothing if the argument is "built-in".
    """
    if source == "built-in" or not dist.is_initialized():
        return choose(source, variable, hub)
    chosen, problem = None, None
    if dist.get_rank(group) == 0:
        chosen, problem = _attempt(lambda: choose(source, variable, hub))
    raise_everywhere(problem, group)
    with set_up():
        place, why = json.loads(gather_texts(json.dumps(chosen), group)[0])
    return place, why


def first_rank_first(load: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Call `load()` on rank 0, then on the others, which find its files cached. A failure is raised on all ranks."""
    if not dist.is_initialized():
        return load()
    loaded, problem = None, None
    for turn in (True, False):
        if (dist.get_rank(group) == 0) is turn:
            loaded, problem = _attempt(load)
        raise_everywhere(problem, group)
    return loaded


def _attempt(function: Callable[[], T]) -> tuple[T | None, str | None]:
    """Return (result, None), or (None, the error's message)."""
    try:
        return function(), None
    except ValueError as error:
        return None, str(error)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def print_once(line: str, group: dist.ProcessGroup | None = None) -> None:
    """Print a line on rank 0 alone."""
    if not dist.is_initialized() or dist.get_rank(group) == 0:
        print(line)
