"""Makes the package of `bin/bench` importable, as its launcher does."""

import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[2])
if TESTS not in sys.path:
    sys.path.append(TESTS)
