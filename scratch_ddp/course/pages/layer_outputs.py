"""What a rank holds of each layer's output, and what was called between them: for `slice_layouts`."""

from collections.abc import Callable, Sequence

from torch import nn

from scratch_ddp.course.plots import Station
from scratch_ddp.instruments.traffic import traffic

Shape = tuple[int, ...]


def layer_stations(
    names: Sequence[str], block: nn.Module, whole: nn.Module, run: Callable[[], object], run_whole: Callable[[], object]
) -> list[Station]:
    """Watch the layers `names` of a sliced block and of the whole one, each while it runs.

    `run` and `run_whole` run the models that the blocks are part of; outputs are (batch, tokens, features).
    """
    stations, before = [], None
    sliced, plain = _outputs(names, block, run), _outputs(names, whole, run_whole)
    for name, (held, calls), (all_of_it, _) in zip(names, sliced, plain, strict=True):
        new = [each for each in calls if before is not None and calls[each] > before.get(each, 0)]
        stations.append(Station(name.split(".")[-1], held, all_of_it, new))
        before = calls
    return stations


def _outputs(names: Sequence[str], block: nn.Module, run: Callable[[], object]) -> list[tuple[Shape, dict[str, int]]]:
    """(tokens, features) of each layer's output, and how often what had been called until then."""
    found: list[tuple[Shape, dict[str, int]]] = []
    with traffic() as counted:
        handles = [
            block.get_submodule(name).register_forward_hook(
                lambda _, args, output: found.append((tuple(output.shape[1:]), dict(counted.calls)))
            )
            for name in names
        ]
        run()
    for handle in handles:
        handle.remove()
    return found
