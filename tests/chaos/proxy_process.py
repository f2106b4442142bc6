"""The proxy in a process of its own, so that nobody's GIL delays what it passes on.

Started by exec; requests and answers are lines of JSON over its standard input and output. It ends
when its standard input does.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec

from tests.chaos.faults import Fault
from tests.chaos.proxy import Door, FaultProxy
from tests.patience import HUNG_S
from tests.support.growing_files import lines_behind

# An hour of weather is a few thousand faults of 200 bytes; a day is a few MB.
_LINE_BYTES_MAX = 1 << 26
_ROOT = Path(__file__).parents[2]


class ProxyProcess:
    """The parent's end. `urls` is the way through each door, by its name."""

    def __init__(self, doors, *, seed, notes_path):
        notes_path.touch()
        self.notes_path = notes_path
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            env=os.environ | {"PYTHONPATH": str(_ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        ports = self._ask(
            "open",
            seed=seed,
            notes_path=str(notes_path),
            doors=[msgspec.to_builtins(door) for door in doors],
        )
        self.urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        self._offset = 0
        self.counts = Counter()
        self.hits = []

    def begin(self):
        self._ask("begin")

    def foresee(self, faults):
        self._ask("foresee", faults=msgspec.to_builtins(list(faults)))

    def calm(self):
        self._ask("calm")

    def passed(self):
        """How many requests went through unharmed."""
        return self._ask("passed")

    def read(self):
        """Take in what was noted since; returns all hits."""
        lines, self._offset = lines_behind(self.notes_path, self._offset)
        for line in lines:
            hit = json.loads(line)
            self.hits.append(hit)
            self.counts[hit["kind"]] += 1
        return self.hits

    def close(self):
        self._process.stdin.close()
        self._process.wait(HUNG_S)
        self._process.stdout.close()

    def _ask(self, what, **more):
        self._process.stdin.write(json.dumps({"what": what, **more}).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the proxy has ended; its standard error says why"
        return json.loads(answer)


async def _opened(asked):
    proxy = FaultProxy(asked["seed"], asked["notes_path"])
    doors = [msgspec.convert(door, Door) for door in asked["doors"]]
    return proxy, {door.name: await proxy.open(door) for door in doors}


async def _serve():
    lines = asyncio.StreamReader(limit=_LINE_BYTES_MAX)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    proxy = None
    while line := await lines.readline():
        asked = json.loads(line)
        answer = None
        match asked["what"]:
            case "open":
                proxy, answer = await _opened(asked)
            case "begin":
                proxy.begin()
            case "foresee":
                proxy.foresee(msgspec.convert(asked["faults"], list[Fault]))
            case "calm":
                proxy.calm()
            case "passed":
                answer = proxy.passed
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    if proxy is not None:
        await proxy.close()


if __name__ == "__main__":
    asyncio.run(_serve())
