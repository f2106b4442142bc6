"""Three managers on machines of their own, each behind its own doors; what they read; the servers.

The lease table is `fleet_rig`'s, which notes each write and what it left: moto would be the
bottleneck of everything else.
"""

import random
from collections import Counter

from tests.chaos.proxy import Door
from tests.chaos.proxy_process import ProxyProcess
from tests.chaos.trimming_kinesis import TRIM_TAG
from tests.chaos.trims import Told, Trims, expired_records
from tests.processes.fleet_rig.aws import WatchedAws
from tests.processes.ledger_rig.application import Application
from tests.processes.ledger_rig.producing import Producer

MANAGERS = ("a", "b", "c")
# Half of the default: more happens in a minute.
FAILOVER_S = 5.0
CAP = 1000
SHARDS_FIRST = 10
SHARDS_MIN, SHARDS_MAX = 8, 16
# A reshard every so many seconds: often enough that parents of one merge are read by two managers,
# one of which is cut off.
_RESHARD_EVERY_S = 6.0
_KEYS = 400
# Of the detail of an event `records_expired`.
_CHILDREN_TOO = "deleted children of this shard as well"


class World:
    """All of it, running; `close` ends all of it."""

    def __init__(self, folder, *, seed, rate, storm_s, fetch="mixed"):
        self.folder = folder
        # As during a deploy that changes it: one machine polls, the others subscribe.
        mixed = dict.fromkeys(MANAGERS, "fan-out") | {MANAGERS[0]: "polling"}
        self._modes = mixed if fetch == "mixed" else dict.fromkeys(MANAGERS, fetch)
        self._closing = []
        # The records that are gone without having been read, and rightly so.
        self.expired = set()
        try:
            self._build(folder, seed, rate, storm_s)
        except BaseException:
            self.close()
            raise

    def _build(self, folder, seed, rate, storm_s):
        self.aws = WatchedAws(folder / "requests", kinesis="tests.chaos.trimming_kinesis")
        self._closing.append(self.aws.close)
        self.stream = self.aws.stream(SHARDS_FIRST)
        services = {
            "kinesis": self.aws.embedded.kinesis_endpoint,
            "dynamodb": self.aws.embedded.dynamodb_endpoint,
        }
        doors = [
            Door(f"{manager}/{service}", int(url.rpartition(":")[2]))
            for manager in MANAGERS
            for service, url in services.items()
        ]
        self.proxy = ProxyProcess(doors, seed=seed, notes_path=folder / "faults")
        self._closing.append(self.proxy.close)
        self.apps = {name: self._application(folder, name) for name in MANAGERS}
        self.ledger = self.apps[MANAGERS[0]].ledger
        self.table = self.apps[MANAGERS[0]].table
        self.source = Producer(
            self.aws.kinesis,
            self.stream,
            10**9,
            seed=seed,
            rate=rate,
            reshards=_reshards(seed, rate, storm_s),
            keys=_KEYS,
        )
        self._closing.append(self.source.stop)
        # Each shard's parents, as the service lists them while it knows the shard.
        self.parents = {}
        self._note_parents()
        self.trims = Trims(self._trim, self.parents, random.Random(f"trims {seed}"))
        self.source.resharded = self._resharded

    def _resharded(self, closed):
        """In the producer's thread."""
        self._note_parents()
        self.trims.closed(closed)

    def _trim(self, shard):
        self.aws.kinesis.add_tags_to_stream(StreamName=self.stream, Tags={TRIM_TAG: shard})

    def _application(self, folder, name):
        urls = {each: self.proxy.urls[f"{name}/{each}"] for each in ("kinesis", "dynamodb")}
        app = Application(
            folder,
            self.aws,
            self.stream,
            machine=name,
            aws={"endpoints": urls},
            leases={"failover": f"{FAILOVER_S:g}s"},
            fetch={"idle": "250ms", "mode": self._modes[name]},
            checkpoint={"every": "1s", "uncheckpointed_max": CAP},
            shutdown={"grace": "20s"},
            log={"level": "info"},
            # Long enough for a signal to fall between a record given and a record kept.
            options={"syncs": True, "batch_s": 0.05},
        )
        self._closing.append(app.close)
        return app

    def start(self):
        for app in self.apps.values():
            app.start()

    def lag(self):
        """Records put that nobody was given yet, and that have not expired as far as is known."""
        return self.source.total_put - len(self.ledger.delivered) - len(self.expired)

    def look_for_expired(self):
        """Take in what the product has said of expired records, and return it."""
        reported = [
            Told(line["shard"], line["position"], _CHILDREN_TOO in line["detail"])
            for app in self.apps.values()
            for line in app.of("records_expired")
        ]
        self.expired = expired_records(
            dict(self.source.put), self.ledger.delivered, self.trims.shards, reported, self.parents
        )
        return reported

    def is_all_read(self):
        """Every record was given to somebody, or has expired in a way that is excused."""
        self.ledger.read()
        self.look_for_expired()
        return self.source.is_done and self.lag() <= 0

    def _note_parents(self):
        pages = self.aws.kinesis.get_paginator("list_shards").paginate(StreamName=self.stream)
        for page in pages:
            for shard in page["Shards"]:
                names = ("ParentShardId", "AdjacentParentShardId")
                self.parents[shard["ShardId"]] = [shard[name] for name in names if name in shard]

    def reshards(self):
        """A merge has one child of two parents, a split two of one."""
        counts = Counter(len(several) for several in self.parents.values())
        return counts[2] + counts[1] // 2

    def make_stream_again(self):
        """Under its name, with records in it."""
        kinesis, name = self.aws.kinesis, {"StreamName": self.stream}
        kinesis.delete_stream(**name, EnforceConsumerDeletion=True)
        kinesis.get_waiter("stream_not_exists").wait(
            **name, WaiterConfig={"Delay": 1, "MaxAttempts": 20}
        )
        kinesis.create_stream(**name, ShardCount=SHARDS_FIRST)
        kinesis.get_waiter("stream_exists").wait(
            **name, WaiterConfig={"Delay": 1, "MaxAttempts": 20}
        )
        entries = [{"Data": b"{}", "PartitionKey": f"key {n}"} for n in range(_KEYS)]
        assert kinesis.put_records(**name, Records=entries)["FailedRecordCount"] == 0

    def close(self):
        while self._closing:
            self._closing.pop()()


def _reshards(seed, rate, storm_s):
    """Splits and merges, by the number of records put before; open shards stay within bounds."""
    rng = random.Random(f"reshards {seed}")
    found, open_shards, at_s = [], SHARDS_FIRST, _RESHARD_EVERY_S / 2
    while at_s < storm_s:
        splits = open_shards == SHARDS_MIN or (open_shards < SHARDS_MAX and rng.random() < 0.5)
        found.append(
            (int(at_s * rate), "split", rng.randrange(open_shards))
            if splits
            else (int(at_s * rate), "merge", rng.randrange(open_shards - 1))
        )
        open_shards += 1 if splits else -1
        at_s += rng.uniform(0.5, 1.5) * _RESHARD_EVERY_S
    return found
