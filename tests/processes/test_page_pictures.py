"""The page as people see it: wide and narrow, light and dark.

KCLRUN_PICTURES=docs/pictures .venv/bin/python -m pytest tests/processes/test_page_pictures.py

writes the pictures of the how-to pages again.
"""

import os
import random
from pathlib import Path

import pytest

from kclrun.model.lease import Halt, Load, OwnerId, Pause
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.model.time import WallTime
from kclrun.operating.doctor.findings import Finding, Kind
from kclrun.operating.summaries import Lag, lag_summary
from kclrun.page.lag_history import LagHistory
from kclrun.page.snapshot import Owners
from tests.processes.page_browser import needs_chromium
from tests.unit.page.fleet import JAVA, NOW, NUMBER, key, lease, shard, snapshot_of
from tests.unit.page.test_page_actions import Site

pytestmark = [pytest.mark.slow, needs_chromium]
HALTED = key(5)
REASON = "ValueError: column 'amount' is not a number"
HALT = Halt(REASON, WallTime(NOW - 4_000))
# Picture, page, scheme and size; the pictures of the how-to pages are those with a name.
SHOWN = [
    ("page-fleet", "/", "light", 1180, 850),
    ("page-shards", "/shards", "light", 1560, 560),
    ("page-shard", f"/shard?key={HALTED}", "dark", 1100, 860),
    ("page-plan", "/act?do=pause&lasting=30m", "light", 1000, 640),
    ("", "/", "dark", 390, 800),
    ("", f"/shard?key={HALTED}", "light", 390, 800),
    ("", "/outputs", "dark", 800, 600),
    ("", "/lineage", "light", 390, 800),
    ("", "/settings", "light", 390, 800),
]


def fleet():
    """Twelve shards in three zones: one is halted, one behind, one paused, one read by Java."""
    chance = random.Random(3)
    lags, leases, history = {}, [], LagHistory()
    for number in range(12):
        zone, host = "abc"[number % 3], f"ip-10-0-{number % 3}-{number // 3}"
        leases.append(
            lease(
                number,
                JAVA if number == 11 else OwnerId(f"kclrun:us-east-1{zone}:{host}:1a2b"),
                checkpoint=ExtendedSequenceNumber(str(int(NUMBER) + number)),
                load=Load(80.0 + 9 * number, 0.02 * (1 + number % 4)),
                halt=HALT if number == 5 else None,
                pause=Pause(WallTime(NOW - 300), WallTime(NOW + 1_500)) if number == 7 else None,
            )
        )
    for sample in range(120):
        behind = {each.key: chance.expovariate(0.25) for each in leases}
        behind |= {HALTED: max(0.0, (sample - 60) * 66.0)}
        behind |= {key(2): max(behind[key(2)], (sample - 90) * 8.0)}
        history.add(behind)
    for each in leases:
        seconds = behind[each.key]
        lag = Lag(seconds, WallTime(NOW - seconds), note="")
        state = "halted" if each.halt else "paused" if each.pause else "owned"
        lags[each.key] = lag_summary(
            shard=each.key,
            state=state,
            owner=each.owner or "",
            checkpoint="",
            lag=lag,
            retention_s=86_400.0,
            note=each.halt.reason if each.halt else "",
        )
    found = Finding(
        kind=Kind.HALTED, keys=(HALTED,), evidence=f"halted for 1.1 h of 24 h: {REASON}"
    )
    return snapshot_of(
        *leases,
        table_at=WallTime(NOW - 2),
        lags_at=WallTime(NOW - 12),
        shards={each.key: shard(number) for number, each in enumerate(leases)},
        lags=lags,
        history=history.look(),
        owners=Owners(frozenset(), frozenset()),
        findings=(found,),
        findings_at=NOW,
    )


@pytest.fixture
def site():
    shown = fleet()
    made = Site(*shown.leases.values(), snapshot=shown)
    yield made
    made.server.close()


def test_no_page_is_wider_than_its_window_and_text_is_readable_in_both_schemes(site, opened):
    tab = opened(with_scripts=True)
    folder = os.environ.get("KCLRUN_PICTURES")
    for name, path, scheme, width, height in SHOWN:
        tab.size(width, height)
        tab.prefer(scheme)
        tab.open(f"{site.server.url}{path}")

        assert tab.value("document.documentElement.scrollWidth") <= width, (path, width)
        assert tab.value(CONTRAST) >= 4.5, (path, scheme)
        if folder and name:
            tab.picture(Path(folder) / f"{name}.png", width, height)


# Of each text with its background, the least contrast by WCAG 2, which wants 4.5 for running text.
CONTRAST = """
(() => {
  const parts = (text) => text.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b]
    .map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = parts(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  let least = 21;
  for (const node of document.querySelectorAll("main *, header *, footer *")) {
    const has = [...node.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!has || !node.getClientRects().length) continue;
    const [a, b] = [light(parts(getComputedStyle(node).color)), light(behind(node))];
    least = Math.min(least, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
  }
  return least;
})()
"""
