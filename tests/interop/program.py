"""`bin/prove interop`: the scenarios beside the real KCL, one after the other."""

import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.interop.rig.artefacts import NotToBeHad
from tests.interop.scenarios import SCENARIOS

_UNAVAILABLE = 69


def run(names, version):
    """All scenarios, or those named; with one version of the KCL, or with each. The exit code: 1 if
    one failed, else 69 if one could not be run here."""
    wanted = [
        (name, each)
        for name in names or SCENARIOS
        for each in SCENARIOS[name][1]
        if version in (None, each)
    ]
    failed, unavailable = [], []
    for name, each in wanted:
        print(f"{name} ({each}) …", flush=True)
        folder = Path(tempfile.mkdtemp(prefix=f"kclrun-interop-{name}-"))
        began = time.monotonic()
        try:
            figures = SCENARIOS[name][0](folder, each)
        except NotToBeHad as reason:
            print(f"cannot be run here: {reason}", file=sys.stderr)
            unavailable.append(f"{name} ({each})")
        except Exception:
            traceback.print_exc()
            print(f"  FAILED after {time.monotonic() - began:.0f} s; logs: {folder}", flush=True)
            failed.append(f"{name} ({each})")
        else:
            for figure in figures:
                print(f"  {figure}")
            print(f"  held, in {time.monotonic() - began:.0f} s", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    if failed:
        print(f"{len(failed)} of {len(wanted)} failed: {', '.join(failed)}", file=sys.stderr)
    if unavailable:
        print(f"not run: {', '.join(unavailable)}", file=sys.stderr)
    return 1 if failed else _UNAVAILABLE if unavailable else 0
