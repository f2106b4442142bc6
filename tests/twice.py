"""`python -m tests.twice ARGUMENTS`: pytest, and a second try of the tests that failed.

A decision that is wrong fails twice. One test in some ten thousand meets a machine that stands
still for seconds, and passes alone. The second run has one worker. Both print failures whole.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# More failures than this in one group are not chance: there is no second run.
SECOND_TRIES_MAX = 3
PASSED_LATER = """\
They passed the second time. A machine that stands still for some seconds does that to a test, and
this checkout can be trusted. A test that needs its second try often is a defect of kclrun."""


def run(arguments: list[str]) -> int:
    """pytest's exit code; 0 if all that failed at first passed the second time."""
    outer = os.environ.pop("KCLRUN_TEST_FAILURES", None)
    with tempfile.TemporaryDirectory(prefix="kclrun-tests-") as folder:
        notes = Path(folder) / "failures"
        notes.touch()
        noting = {"KCLRUN_TEST_FAILURES": str(notes)}
        os.environ.update(noting)
        arguments = [*arguments, "-o", f"cache_dir={folder}/cache"]
        code = int(pytest.main(arguments))
        failures = notes.read_text().splitlines()
        if code == pytest.ExitCode.TESTS_FAILED and may_be_chance(failures):
            print("\n-- second try of the tests that failed", flush=True)
            notes.write_text("")
            again = [*arguments, "--last-failed", "--last-failed-no-failures=none", "-n", "0"]
            # A process of its own: modules and plugins of the first run are in this one.
            code = subprocess.run(
                [sys.executable, "-m", "pytest", *again], env={**os.environ, **noting}, check=False
            ).returncode
            print(f"\n{len(failures)} failed at first and had a second try:")
            print("\n".join(f"  {each}" for each in failures))
            if code == 0:
                print(PASSED_LATER, flush=True)
            if of_all := os.environ.get("KCLRUN_TEST_SECOND_TRIES"):
                with Path(of_all).open("a") as file:
                    file.writelines(f"{failure}\n" for failure in failures)
        if outer:
            with Path(outer).open("a") as file:
                file.write(notes.read_text())
    return code


def may_be_chance(failures: list[str]) -> bool:
    """Few tests, and none of them hung: the limit of a test is for both tries."""
    hung = any(": time limit: " in each for each in failures)
    return 0 < len(failures) <= SECOND_TRIES_MAX and not hung


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
