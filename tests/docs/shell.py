"""One shell that types a page: its files are written and its commands run, in order."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from tests.docs.blocks import commands_of
from tests.patience import TEST_S

# Marks the end of a command's output, with its exit code.
_END = "\x1e"


class Session:
    """The transcript of a page: (command, exit code, output) for each command that was run."""

    def __init__(self, page_blocks, folder, replaced):
        self._blocks = page_blocks
        self._folder = folder
        self._replaced = replaced
        self._commands = []

    def run(self):
        """Types the page. Everything that it started has ended when this returns."""
        script = self._folder / ".script"
        script.write_text("\n".join(self._lines()), encoding="utf-8")
        said = self._folder / ".said"
        with said.open("wb") as out:
            shell = subprocess.Popen(
                ["bash", str(script)],
                cwd=self._folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                shell.wait(TEST_S * 0.9)
            finally:
                _end_group(shell)
        return self._transcript(said.read_text(encoding="utf-8", errors="replace"))

    def _lines(self):
        for block in self._blocks:
            if block.kind == "file":
                place = shlex.quote(block.note)
                yield f"mkdir -p -- $(dirname -- {place})"
                yield f"cat > {place} <<'KCLRUN_END_OF_FILE'"
                yield self._text(block.text) + "KCLRUN_END_OF_FILE"
            elif block.kind == "run":
                for command in commands_of(block):
                    self._commands.append(command)
                    yield self._text(command.text)
                    yield f"printf '{_END}%s{_END}' $?"

    def _text(self, text):
        for shown, here in self._replaced.items():
            text = text.replace(shown, here)
        return text

    def _environment(self):
        """A user's: the tools of this environment, a home of its own, no AWS account."""
        kept = {
            key: os.environ[key] for key in ("LANG", "JAVA_HOME", "TMPDIR") if key in os.environ
        }
        tools = Path(sys.executable).parent
        return kept | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "HOME": str(self._folder),
            "PYSPARK_PYTHON": sys.executable,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def _transcript(self, said):
        parts = re.split(f"{_END}(\\d+){_END}", said)
        outputs, codes = parts[0::2], parts[1::2]
        ended = zip(self._commands, codes, outputs, strict=False)
        transcript = [(command, int(code), output) for command, code, output in ended]
        for command in self._commands[len(codes) :]:
            transcript.append((command, None, outputs[-1]))
        return transcript


def _end_group(shell):
    """Ends the shell's own process group: what a page leaves in the background."""
    try:
        os.killpg(shell.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    shell.wait()
