"""The lines of a process that runs user code end with the process, whatever it has started."""

import os
import signal
import subprocess
import sys

import pytest

from kclrun.cli.child_lines import lines_of

SLEEP = "import time; time.sleep(3600)"
STARTS = {
    "nothing": "",
    "a program": f"subprocess.Popen([sys.executable, '-c', {SLEEP!r}])\n",
    "a fork": "if not os.fork():\n    time.sleep(3600)\n",
}


@pytest.mark.parametrize("starts", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("rest", ["", "without an end"])
def test_the_lines_of_a_process_end_with_it(starts, rest):
    code = f"import os, subprocess, sys, time\n{starts}"
    code += f"os.write(1, b'one\\ntwo\\n' + b'x' * 100_000 + b'\\n{rest}')\nos._exit(0)\n"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, process_group=0
    ) as process:
        lines = list(lines_of(process))
        # Until it is waited for, no other group has its number.
        os.killpg(process.pid, signal.SIGKILL)

    assert lines == [b"one\n", b"two\n", b"x" * 100_000 + b"\n", *([rest.encode()] if rest else [])]
