"""A whole manager over a lease table in memory, with the test's own lease processes.

Arguments: behaviour, grace in seconds, report path, "until-caught-up" or "for-ever".
"""

import sys
import threading
from pathlib import Path

from kclrun.config.schema import LeaseSettings, LogSettings, Settings, ShutdownSettings
from kclrun.config.units import Duration
from kclrun.local.lease_rows import LeaseRows
from kclrun.manager.forks import Launcher
from kclrun.manager.runtime import run_fleet
from kclrun.manager.world import FleetServices, SourceStream
from kclrun.model.shard import HASH_KEY_MAX, HashRange, Shard
from kclrun.model.stream import ONLY_STREAM
from kclrun.model.wire import WireCredentials, WireEndpoint
from kclrun.ports import StreamSummary

ENDPOINT = WireEndpoint(url="http://127.0.0.1:9", region="x", signing_region="x")


class TwoShards:
    def summary(self):
        return StreamSummary("orders", "arn:orders", "ACTIVE", 24, 2, 0.0)

    def list_shards(self, shard_filter=None):
        half = HASH_KEY_MAX // 2
        ranges = (HashRange(0, half), HashRange(half + 1, HASH_KEY_MAX))
        return tuple(
            Shard(f"shardId-{number:012d}", hash_range, str(number + 1))
            for number, hash_range in enumerate(ranges)
        )


class LockedRows:
    """The table in memory, for the several threads of a manager."""

    def __init__(self):
        self.rows = LeaseRows()
        self.lock = threading.Lock()

    def scan(self, *, consistent=True):
        with self.lock:
            return list(self.rows.scan())

    def read(self, key):
        with self.lock:
            return self.rows.read(key)

    def offered(self, rows_max):
        with self.lock:
            return self.rows.offered(rows_max)

    def write(self, change):
        with self.lock:
            return self.rows.write(change)


class Keys:
    def current(self):
        return WireCredentials("AKIACANARYCANARYCANARY", "canary/secret/key/of/forty/characters000")

    def notify(self, replaced):
        pass


def main():
    behaviour, grace_s, report, until = sys.argv[1:]
    settings = Settings(
        application="orders",
        stream="orders",
        processor="m:C",
        options={"behaviour": behaviour},
        leases=LeaseSettings(failover=Duration(10)),
        stall=Duration(1.0 if behaviour == "wedged" else 120.0),
        shutdown=ShutdownSettings(grace=Duration(float(grace_s))),
        log=LogSettings(level="debug", format="json"),
    )
    stream = TwoShards()
    world = FleetServices(
        table=LockedRows(),
        streams={ONLY_STREAM: SourceStream(stream, stream.summary(), settings.sources[0])},
        credentials=Keys(),
        kinesis=ENDPOINT,
        dynamodb=ENDPOINT,
    )
    samples = []
    reason = run_fleet(
        settings,
        world,
        report_path=Path(report),
        until="caught-up" if until == "until-caught-up" else None,
        on_sample=samples.append,
        launcher=Launcher("lease_entry:run"),
    )
    print("samples", len(samples), "leases", len(samples[-1].leases) if samples else 0)
    return reason.exit_code


if __name__ == "__main__":
    sys.exit(main())
