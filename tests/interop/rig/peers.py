"""The workers: the real KCL in a JVM, and kclrun, each ended by its own pid."""

import contextlib
import os
import shutil
import signal
import uuid
from collections import Counter
from pathlib import Path

from tests.interop.rig.artefacts import consumer_classpath, kclpy
from tests.interop.rig.ledger import Ledger, judge
from tests.interop.rig.world import Producer, Stream, World, until
from tests.patience import HUNG_S
from tests.processes.ledger_rig.application import Application
from tests.support.programs import started

_PROCESSORS = Path(__file__).parent / "processor"
_MADE_UP_CREATION = 12345
COMPATIBLE = "CLIENT_VERSION_CONFIG_COMPATIBLE_WITH_2X"


class JavaWorker:
    """`LedgerConsumer` on one version of the KCL. `properties` are its settings."""

    def __init__(self, rig, version, who, **properties):
        self.who = who
        self.log_path = rig.folder / f"{who}.log"
        if version.startswith("3."):
            properties = {"compatible": COMPATIBLE} | properties
        settings = {
            "who": who,
            "stream": rig.stream.name,
            "table": rig.stream.table,
            "kinesis": rig.world.embedded.kinesis_endpoint,
            "dynamodb": rig.world.embedded.dynamodb_endpoint,
            "ledger": rig.ledger.path,
            **properties,
        }
        if rig.has_several:
            settings["streams"] = ",".join(stream.identifier for stream in rig.streams)
        self.process = started(
            [
                *("java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
                "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
                *(f"-D{name}={value}" for name, value in settings.items()),
                *("-cp", consumer_classpath(version), "kclrun.LedgerConsumer"),
            ],
            self.log_path,
            cwd=rig.folder,
            env={"PATH": os.environ["PATH"], "AWS_EC2_METADATA_DISABLED": "true"},
            process_group=0,
        )

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(HUNG_S)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def close(self):
        if self.process.poll() is None:
            self.kill()


class KclpyDaemon:
    """amazon_kclpy's daemon, polling; all else is default but the heap, and the minute that its
    first start sleeps. `script` is its user code."""

    def __init__(
        self,
        rig,
        version,
        compatible=COMPATIBLE,
        script=_PROCESSORS / "kclpy_recorder.py",
        arguments="",
    ):
        python, classpath = kclpy(version)
        endpoints = rig.world.embedded
        recorder = Path(shutil.copy(script, rig.folder))
        settings = {
            # The daemon splits this at each space, and this checkout's path may have one.
            "executableName": f"{python} {recorder.name} {arguments}".strip(),
            "streamName": rig.stream.name,
            "applicationName": rig.stream.table,
            "workerId": "kclpy",
            "processingLanguage": "python/3.11",
            "AwsCredentialsProvider": "EnvironmentVariableCredentialsProvider",
            "initialPositionInStream": "TRIM_HORIZON",
            "regionName": "us-east-1",
            "kinesisEndpoint": endpoints.kinesis_endpoint,
            "dynamoDBEndpoint": endpoints.dynamodb_endpoint,
            "metricsLevel": "NONE",
            "retrievalMode": "POLLING",
            "shardSyncIntervalMillis": 1000,
            "clientVersionConfig": compatible,
        }
        properties = rig.folder / "kclpy.properties"
        properties.write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
        self.log_path = rig.folder / "kclpy.log"
        self.process = started(
            [
                *("java", "-Xmx256m", "-XX:+UseSerialGC", "-cp", classpath),
                "software.amazon.kinesis.multilang.MultiLangDaemon",
                *("--properties-file", properties),
            ],
            self.log_path,
            cwd=rig.folder,
            env={
                "PATH": os.environ["PATH"],
                "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_EC2_METADATA_DISABLED": "true",
                "KCLRUN_RIG_LEDGER": str(rig.ledger.path),
            },
            process_group=0,
        )

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(HUNG_S)

    def close(self):
        """The daemon and its consumers, which are in the process group that was made for it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Kclrun(Application):
    """One machine with kclrun: all default but that it checkpoints every batch."""

    def _settings(self, aws, stream, more):
        base = super()._settings(aws, stream, {})
        settings = {name: base[name] for name in ("application", "stream", "aws", "log")} | {
            "processor": "interop_processor:Recorder",
            "path": str(_PROCESSORS),
            "options": {"ledger": str(self.folder.parent / "common-ledger")},
            "fetch": {"idle": "500ms"},
            "checkpoint": {"every": "batch"},
        }
        if "streams" in more:
            del settings["stream"]
        for name, value in more.items():
            merged = {**settings.get(name, {}), **value} if isinstance(value, dict) else value
            settings[name] = merged
        return settings


class Rig:
    """One stream or several over one table, their ledger and their workers; all ended by `close`.
    `stream` is the only one, or the first; of the others Java has a made-up creation."""

    def __init__(self, folder, shards, streams=1):
        self.folder = folder
        self.has_several = streams > 1
        self._application = f"several-{uuid.uuid4().hex[:10]}" if self.has_several else None
        self.ledger = Ledger(folder / "common-ledger")
        self.world = World(folder)
        self._open = [self.world]
        try:
            table = f"app-{self._application}" if self.has_several else None
            # The KCL takes the creation from its settings and compares it with nothing.
            creations = [None, *(_MADE_UP_CREATION for _ in range(streams - 1))]
            self.streams = [Stream(self.world, shards, table, each) for each in creations]
            self.stream = self.streams[0]
        except BaseException:
            self.close()
            raise

    def java(self, version, who="java", **properties):
        return self._keep(JavaWorker(self, version, who, **properties))

    def kclpy(self, version, **properties):
        return self._keep(KclpyDaemon(self, version, **properties))

    def kclrun(self, who="kclrun", **settings):
        if self.has_several:
            settings["streams"] = [{"name": stream.name} for stream in self.streams]
            settings["options"] = {**settings.get("options", {}), "several": True}
        application = self._application or self.stream.name
        return self._keep(Kclrun(self.folder, self.world, application, machine=who, **settings))

    def producer(self, every_s=0.5):
        return Producer(self.streams, every_s)

    def _keep(self, worker):
        self._open.append(worker)
        return worker

    def until(self, condition, what, within_s=HUNG_S):
        """Poll, the ledger being up to date; after how many seconds it held."""

        def held():
            self.ledger.read()
            return condition()

        return until(held, what, within_s)[1]

    def owners(self):
        """The owner of each open shard's lease, over all streams."""
        return {
            stream.in_ledger(shard): owner
            for stream in self.streams
            for shard, owner in stream.owners().items()
        }

    def shares(self):
        """How many open shards each owner has; `None` for those without."""
        return Counter(self.owners().values())

    def put(self):
        """Every record that was put, to where."""
        return {record: at for stream in self.streams for record, at in stream.put.items()}

    def until_all_given(self, within_s=HUNG_S):
        """Until every record that was put was given to a worker; after how many seconds."""
        put = self.put()
        return self.until(lambda: put.keys() <= self.ledger.records, "all given", within_s)

    def verdict(self):
        """Asserts that nothing was lost, invented or out of order."""
        parents = {shard: of for stream in self.streams for shard, of in stream.parents().items()}
        verdict = judge(self.put(), parents, self.ledger.read())
        assert not verdict.faults, verdict.faults
        return verdict

    def close(self):
        while self._open:
            self._open.pop().close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
