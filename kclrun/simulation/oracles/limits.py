"""I12: a core holds no more than its rows, its shards and its fleet give reason for.

Walks the containers of a core by their attributes, whatever they are called: a new one is watched
from the day it is written. May not know: what is in them. Rule: asked for now and then, for it
costs more than an event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import Any, Final

import msgspec

from kclrun.simulation.story import RuleBroken

__all__ = ["HELD_BESIDES_MAX", "require_bounded", "sizes_of"]

# What a core holds beside its rows and shards: tables of handlers, a few events under way.
HELD_BESIDES_MAX: Final = 64
# Objects that belong to a core; what they point to elsewhere (settings, chance) is not its own.
_CORES: Final = ("kclrun.leases", "kclrun.consuming")


def require_bounded(who: str, key: str, core: object, held_max: int) -> None:
    """Raises: RuleBroken for a container of `core` with more than `held_max` entries, and what it
    holds besides."""
    for path, size in sizes_of(core):
        if size > held_max + HELD_BESIDES_MAX:
            words = f"{who} holds {size} entries in {path}, and {held_max} have a reason"
            raise RuleBroken("I12", key, words)


def sizes_of(core: object) -> Iterator[tuple[str, int]]:
    """Every container that hangs on a core, with its path and its size."""
    seen: set[int] = set()
    name = type(core).__name__
    waiting: deque[tuple[str, object]] = deque((f"{name}.{k}", v) for k, v in _attributes(core))
    while waiting:
        path, thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Mapping | Set | list | deque | tuple):
            yield path, len(thing)
            if (some := _one_of(thing)) is not None:
                waiting.append((f"{path}[]", some))
        elif type(thing).__module__.startswith(_CORES):
            waiting.extend((f"{path}.{name}", value) for name, value in _attributes(thing))


def _one_of(container: Any) -> object | None:
    """The first part of a core in it (of its values, if it is a mapping), to look into: the others
    are of its kind."""
    values = container.values() if isinstance(container, Mapping) else container
    return next((each for each in values if type(each).__module__.startswith(_CORES)), None)


def _attributes(thing: object) -> Iterator[tuple[str, object]]:
    if isinstance(thing, msgspec.Struct):
        yield from ((name, getattr(thing, name)) for name in thing.__struct_fields__)
    else:
        yield from vars(thing).items() if hasattr(thing, "__dict__") else ()
