"""Beside the real KCL, in four minutes: the rest is `bin/prove interop`."""

import pytest

from tests.interop.rig.artefacts import NotToBeHad, consumer_classpath
from tests.interop.scenarios import SCENARIOS, SHARE

# Alone: a JVM on a busy machine loses leases by itself. The first run fetches 180 MB.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(("name", "version"), SHARE, ids=map("-".join, SHARE))
def test_what_is_claimed_beside_the_real_kcl_holds(name, version, tmp_path):
    try:
        consumer_classpath(version)
    except NotToBeHad as reason:
        pytest.skip(f"nothing ran beside the real Java KCL {version}: {reason}")

    for figure in SCENARIOS[name][0](tmp_path, version):
        print(figure)
