"""A bug to plant: one place of a product source file, said otherwise."""

from pathlib import Path
from typing import Literal, TypeGuard, get_args

import msgspec

ROOT = Path(__file__).parents[3]
# How the layer of those begins that a tiny world must catch; its name follows, then a fault of it.
WORLDS = "worlds:"
# Where storms are looked for, seed by seed: `grounds.py` says what each is.
Ground = Literal["storms", "dense storms", "rough storms", "expiring storms"]


def is_ground(layer: str) -> TypeGuard[Ground]:
    """Whether this layer catches by storms of seeds."""
    return layer in get_args(Ground)


class Mutant(msgspec.Struct, frozen=True, kw_only=True):
    """`old` stands exactly once in `file` (a path from the root of the checkout).

    `breaks` says what goes wrong, `source` who made this mistake, or which rule forbids it.
    `layer` is who must catch it: a ground of storms, "worlds:" and the name of one, or the test
    that does, as pytest names it.
    `found_at`: the storm that caught it last; a share begins its hunt there. None if that is not
    known: then a share leaves it out.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    source: str
    layer: str = "storms"
    found_at: int | None = None

    @property
    def is_quick(self) -> bool:
        """Whether it is known where to look."""
        return self.found_at is not None or not is_ground(self.layer)

    @property
    def module(self) -> str:
        """The name under which the file is imported."""
        return ".".join(Path(self.file).with_suffix("").parts)

    def patched(self, text: str) -> str:
        """The source with the bug in it. Raises: ValueError if `old` is not there exactly once."""
        found = text.count(self.old)
        if found != 1:
            raise ValueError(
                f"mutant {self.name} does not apply: its old text stands {found} times in"
                f" {self.file}; say the same bug over the code as it is now"
            )
        return text.replace(self.old, self.new)
