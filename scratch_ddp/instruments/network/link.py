"""Where a link is meant, its preset's name will do."""

from scratch_ddp.instruments.cost.wire import PRESETS, Link, preset

__all__ = ["PRESETS", "Link", "as_link", "preset"]


def as_link(link: Link | str | None) -> Link | None:
    """Return the link meant by a Link, a preset's name or None.

    Raises ValueError, listing the presets, for an unknown name, and TypeError for anything else.
    """
    if link is None or isinstance(link, Link):
        return link
    if isinstance(link, str):
        return preset(link)
    raise TypeError(f"a Link, the name of a preset or None is needed, not {type(link).__name__}")
