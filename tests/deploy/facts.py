"""What every way to run kclrun has to agree on, read where it is decided: settings, image, unit."""

import re

from kclrun.config.load import settings_of
from kclrun.model.time import WallTime
from tests.deploy.test_dockerfile import ROOT, STAGES, of

DEPLOY = ROOT / "config" / "deploy"
# A drain ends at shutdown.grace; what is left is killed ten seconds later.
KILL_AFTER_S = 10
UNIT = (DEPLOY / "kclrun.service").read_text()
# An end that was asked for, and those that a person has to look at.
NOT_RESTARTED = {
    0,
    *map(int, re.search(r"^RestartPreventExitStatus=(.*)$", UNIT, re.MULTILINE)[1].split()),
}
[USER] = of(STAGES[1], "USER")
PROGRAM = ["/opt/kclrun/bin/kclrun", "--config", "/opt/kclrun/app/app.yaml"]
STATE_DIR = re.search(r"KCLRUN_STATE_DIR=(\S+)", " ".join(of(STAGES[1], "ENV")))[1]


def settings_by(words):
    """The settings that a command line makes of an app.yaml with nothing in it."""
    given = [words[n + 1] for n, word in enumerate(words) if word == "--set"]
    text = "application: shop\nstream: shop\nprocessor: m:C\n"
    return settings_of(text, given, environment={}, now=WallTime(1_800_000_000.0))
