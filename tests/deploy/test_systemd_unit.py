"""The systemd unit: systemd takes it, and it says of kclrun what kclrun says of itself."""

import re
from pathlib import Path

from botocore.session import Session

from kclrun.cli import exit_codes
from kclrun.config.schema import Settings
from kclrun.manager import metering
from tests.support.programs import needs, run_to_end

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "config" / "deploy" / "kclrun.service"
# Of 10; what systemd-analyze calls OK.
EXPOSURE_MAX = 2.0
METADATA = ("metadata_service_timeout", "metadata_service_num_attempts")


def setting(name):
    """All values of a directive, in their order."""
    return re.findall(rf"^{name}=(.*)$", UNIT.read_text(), re.MULTILINE)


def analyze(*arguments):
    needs("systemd-analyze")
    return run_to_end(["systemd-analyze", *arguments])


def installed(tmp_path):
    """The unit with a program that is there."""
    unit = tmp_path / "kclrun.service"
    unit.write_text(UNIT.read_text().replace("/opt/kclrun/bin/kclrun", "/bin/true"))
    return unit


def test_systemd_understands_every_line(tmp_path):
    verified = analyze("verify", "--man=no", installed(tmp_path))

    assert (verified.returncode, verified.stderr) == (0, "")


def test_a_line_that_systemd_does_not_know_would_be_found(tmp_path):
    unit = installed(tmp_path)
    unit.write_text(unit.read_text().replace("WatchdogSec=", "WatchdogSecs="))

    assert "WatchdogSecs" in analyze("verify", "--man=no", unit).stderr


def test_little_is_left_that_the_application_could_do_to_the_machine(tmp_path):
    secured = analyze(
        "security", "--offline=yes", f"--threshold={EXPOSURE_MAX * 10:.0f}", installed(tmp_path)
    )

    assert secured.returncode == 0, secured.stdout[-300:]


def test_what_no_restart_can_heal_is_not_restarted():
    """The exit codes that the page answers with no."""
    text = (ROOT / "docs" / "reference" / "exit-codes.md").read_text()
    table = text.split("| code | meaning | restart? |\n|---|---|---|\n")[1].split("\n\n")[0]
    rows = [re.fullmatch(r"\| (\d+) \|.*\| (\S+) \|", line) for line in table.splitlines()]
    final = {int(row[1]) for row in rows if row[2] == "no"}

    assert setting("RestartPreventExitStatus") == [" ".join(map(str, sorted(final)))]
    assert final == {
        exit_codes.USAGE,
        exit_codes.HALTED,
        exit_codes.NO_STREAM,
        exit_codes.PERMISSION,
        exit_codes.CONFIGURATION,
    }
    # And an end in good order is one: the instance may be on its way out.
    assert setting("Restart") == ["on-failure"]


def test_metadata_that_answers_late_is_no_missing_permission(monkeypatch):
    """The names are botocore's, for its own question for a role's keys."""
    for name in METADATA:
        monkeypatch.delenv(f"AWS_{name.upper()}", raising=False)
    session = Session()
    alone = [session.get_config_variable(name) for name in METADATA]

    for name, value in (
        word.split("=") for line in setting("Environment") for word in line.split()
    ):
        monkeypatch.setenv(name, value)

    assert alone == [1, 1]
    assert [session.get_config_variable(name) for name in METADATA] == [5, 3]


def test_a_drain_is_given_its_grace_and_the_last_writes():
    grace_s = float(Settings(application="orders", stream="orders").shutdown.grace)

    assert setting("TimeoutStopSec") == [f"{grace_s + metering._AFTER_GRACE_S:.0f}s"]
    assert setting("KillMode") == ["mixed"]


def test_a_start_is_given_the_time_that_the_settings_give_it():
    settings = Settings(application="orders", stream="orders")
    assert setting("TimeoutStartSec") == ["4min"]
    assert float(settings.aws.start_timeout) + float(settings.stall) < 240


def test_the_watchdog_waits_for_several_looks():
    assert setting("Type") == ["notify"]
    assert setting("WatchdogSec") == ["30s"]
    assert metering.SAMPLE_EVERY_S * 5 < 30
