"""`python -m kclrun`: the same as the command `kclrun`, without the current folder on the path."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # `-m` puts the current folder first. User code comes from where the configuration says [S4];
    # only a source tree that holds this very package may stay.
    if sys.path[0] != str(Path(__file__).resolve().parent.parent) and not sys.flags.safe_path:
        sys.path.pop(0)
    from kclrun.cli import main

    sys.exit(main())
