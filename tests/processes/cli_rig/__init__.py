"""A stream and a lease table of a test's own on an embedded AWS, and `kclrun` as a process."""

import contextlib
import io
import json
import queue
import signal
import subprocess
import sys
import threading
import time

import msgspec

from kclrun.aws.operations import Operation
from kclrun.aws.put_records import ShardPacker, batches, send_all
from kclrun.cli.program import run_program
from kclrun.cli.services import Aws
from kclrun.config.load import settings_of
from kclrun.local.filling import middle, wait_until_active
from kclrun.model.record import PutEntry
from kclrun.model.time import WallTime
from tests.patience import HUNG_S
from tests.support.programs import run_to_end

__all__ = ["Program", "Site", "called", "ended"]

PATIENCE_S = HUNG_S


class Site:
    """One application: `app.yaml` in a folder, its stream with some shards."""

    def __init__(self, folder, endpoint, name, shards):
        self.config = folder / "app.yaml"
        self.config.write_text(
            f"application: {name}\nstream: {name}\nprocessor: kclrun.samples.hello:Hello\n"
            "leases: {failover: 1s}\n"
            f"aws: {{region: us-east-1, endpoint: '{endpoint}', start_timeout: 5s}}\n"
        )
        self.config.chmod(0o600)
        settings = settings_of(self.config.read_text(), environment={}, now=WallTime(time.time()))
        self.aws = Aws(settings)
        self.call("CreateStream", StreamName=name, ShardCount=shards)
        wait_until_active(self.aws.stream)

    def call(self, operation, **request):
        """One request to Kinesis."""
        write = Operation("kinesis", operation, is_write=True)
        self.aws.kinesis_client.call(write, msgspec.json.encode(request))

    def put(self, rows, *, aggregate=False):
        """Put (key, text) pairs; packed by shard as the KPL does with `aggregate`."""
        entries = [PutEntry(text.encode(), key) for key, text in rows]
        if aggregate:
            packer = ShardPacker(self.aws.stream.list_shards(), 1.0)
            entries = [packed for entry in entries for packed in packer.add(entry)]
            entries += packer.flush()
        for batch in batches(entries):
            send_all(self.aws.kinesis_client, self.aws.settings.stream, batch)

    def open_shards(self):
        shards = [shard for shard in self.aws.stream.list_shards() if shard.is_open]
        return sorted(shards, key=lambda shard: shard.hash_range.start)

    def split(self, shard):
        self.call(
            "SplitShard",
            StreamName=self.aws.settings.stream,
            ShardToSplit=shard.shard_id,
            NewStartingHashKey=str(middle(shard.hash_range)),
        )
        wait_until_active(self.aws.stream)

    def merge(self, first, second):
        self.call(
            "MergeShards",
            StreamName=self.aws.settings.stream,
            ShardToMerge=first.shard_id,
            AdjacentShardToMerge=second.shard_id,
        )
        wait_until_active(self.aws.stream)


class Program:
    """`kclrun …` as it runs: its lines of output, as they come, and what it told."""

    def __init__(self, *arguments):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kclrun", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines = []
        self._out, self._err = queue.Queue(), queue.Queue()
        self.reported = []
        self._threads = [
            threading.Thread(target=self._pass_on, args=pair)
            for pair in ((self._process.stdout, self._out), (self._process.stderr, self._err))
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _pass_on(pipe, into):
        for line in pipe:
            into.put(line.rstrip("\n"))
        pipe.close()

    def until_lines(self, count):
        """Wait for so many lines of output in all."""
        over = time.monotonic() + PATIENCE_S
        while len(self.lines) < count:
            self.lines.append(self._next(self._out, over))
        return self.lines

    def until_reported(self, part):
        """Wait for a line on standard error that has this part."""
        over = time.monotonic() + PATIENCE_S
        while not any(part in line for line in self.reported):
            self.reported.append(self._next(self._err, over))

    def _next(self, lines, over):
        try:
            return lines.get(timeout=max(0.0, over - time.monotonic()))
        except queue.Empty:
            while not self._err.empty():
                self.reported.append(self._err.get())
            raise AssertionError(f"not in time: {self.lines[-3:]} {self.reported}") from None

    def end(self, number=signal.SIGINT):
        """Signal it, wait for its end, take in the rest of what it wrote; the exit code."""
        self._process.send_signal(number)
        return self.wait()

    def wait(self):
        code = self._process.wait(PATIENCE_S)
        for thread in self._threads:
            thread.join(PATIENCE_S)
        while not self._out.empty():
            self.lines.append(self._out.get())
        while not self._err.empty():
            self.reported.append(self._err.get())
        return code

    def close(self):
        """Whatever became of the test: nothing is left running."""
        if self._process.poll() is None:
            self._process.kill()
        self.wait()

    @property
    def records(self):
        return [json.loads(line) for line in self.lines]


def called(*arguments):
    """What `kclrun …` does, in this process: (exit code, output, what it told)."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as reported,
    ):
        code = run_program([str(each) for each in arguments])
    return code, out.getvalue(), reported.getvalue()


def ended(*arguments):
    """Run `kclrun …` to its end: (exit code, output, what it told)."""
    done = run_to_end([sys.executable, "-m", "kclrun", *arguments], timeout_s=PATIENCE_S * 2)
    return done.returncode, done.stdout, done.stderr
