"""Plants a bug into this process: one module is compiled from a changed source as it is imported.

The checkout is never written, and no compiled file kept. Rule: plant before the module is
imported; afterwards it is too late, and an error.

As a plugin of pytest (`-p tests.simulation.mutants.planting`) it plants the mutant that the
environment variable KCLRUN_MUTANT names.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType, ModuleType

from tests.simulation.mutants.catalogue import MUTANTS
from tests.simulation.mutants.mutant import ROOT, Mutant

PLANTED = "KCLRUN_MUTANT"


def plant(mutant: Mutant) -> None:
    """From now on the mutant's module is the patched one. Raises: RuntimeError if it is imported
    already, ValueError if the patch does not apply."""
    if mutant.module in sys.modules:
        raise RuntimeError(f"{mutant.module} is imported already: {mutant.name} comes too late")
    mutant.patched((ROOT / mutant.file).read_text())
    sys.meta_path.insert(0, _Planter(mutant))


def plant_named(name: str | None) -> None:
    """As `plant`, in a process that has just begun; nothing for None."""
    if name is not None:
        plant(MUTANTS[name])


class _Planter(MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._mutant.module:
            return None
        file = str(ROOT / self._mutant.file)
        found = PathFinder.find_spec(fullname, path)
        if found is None or found.origin != file:
            raise ImportError(f"{fullname} comes from {found and found.origin}, not from {file}")
        return spec_from_file_location(fullname, file, loader=_Loader(fullname, file, self._mutant))


class _Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, mutant: Mutant) -> None:
        super().__init__(fullname, path)
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        """Always from the source: a compiled file would be the real module's."""
        source = self._mutant.patched((ROOT / self._mutant.file).read_text())
        return compile(source, self.path, "exec", dont_inherit=True)


if PLANTED in os.environ:
    plant_named(os.environ[PLANTED])
