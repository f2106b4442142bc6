"""The sample processors, as `kclrun.samples.flights:DelayByCarrier` and the like."""

from __future__ import annotations

from pathlib import Path

__all__: list[str] = []

# Their source is the folder `processors/` of a checkout, and a wheel carries it in this place. A
# package `processors` is never installed: that name belongs to the user's own code.
_CHECKOUT = Path(__file__).resolve().parents[2]
# In an installation that folder is site-packages, whose `processors` would be another's.
if (_CHECKOUT / "pyproject.toml").is_file():
    __path__.append(str(_CHECKOUT / "processors"))
