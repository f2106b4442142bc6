"""An incident on a fleet of three machines: one is lost, one shard hangs on its machine, one record
is poison, one key is hot. The parts that both repairs, by the page and by commands, share."""

import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time

from kclrun.model.lease import Owner
from tests.patience import HUNG_S, until
from tests.processes.cli_rig import Site
from tests.support.clients import client_of
from tests.support.programs import end_family

SHARDS = 6
APPLICATION = "orders"
# The processor hangs on one machine as a call to a disk or a service of that machine does, and
# raises at a record that it cannot parse until its next version is deployed.
PROCESSOR = """
import json, os, time
from pathlib import Path
from kclrun import RecordProcessor

def amount_of(record):
    text = record.data.decode()
    if text.startswith("x") or Path("FOLDER/repaired").exists():
        return 0
    return json.loads(text)["amount"]

class Totals(RecordProcessor):
    def process_records(self, batch, checkpointer):
        for record in batch:
            if record.data == b'{"amount": 7, "needs": "disk"}':
                while "machine-b" in os.environ["KCLRUN_STATE_DIR"]:
                    time.sleep(0.1)
            amount_of(record)
"""
SETTINGS = """\
path: {folder}
fetch: {{idle: 200ms}}
checkpoint: {{every: 1s}}
stall: 20s
on_error:
  {{retries: 2, backoff: 50ms, then: dead-letter, dead_letter: {{path: '{folder}/letters'}}}}
observe: {{listen: 0, hot_window: 5s, story: 's3://stories/fleet'}}
"""


class Machine:
    """A manager with a state folder of its own, as on a machine of its own."""

    def __init__(self, site, folder):
        self.folder = folder
        folder.mkdir()
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kclrun", "--config", str(site.config)],
                env=os.environ | {"KCLRUN_STATE_DIR": str(folder)},
                stderr=log,
            )

    def events(self, name):
        lines = self.log.read_text().splitlines()
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [line for line in found if line["event"] == name]

    def lose(self):
        """Nothing of it runs on: neither the manager, nor its launcher, nor a lease process."""
        end_family(self.process)


def prepared_site(folder, endpoint, name, settings, processor, shards, failover="1s"):
    """A site whose processor is `mine:…` in the folder, and whose stories are in S3."""
    site = Site(folder, endpoint, name, shards)
    (folder / "mine.py").write_text(processor.replace("FOLDER", str(folder)))
    (called,) = [line for line in processor.splitlines() if line.startswith("class ")]
    text = site.config.read_text()
    text = text.replace("kclrun.samples.hello:Hello", f"mine:{called[6:].partition('(')[0]}")
    text = text.replace("failover: 1s", f"failover: {failover}")
    site.config.write_text(text + settings.format(folder=folder))
    s3 = client_of("s3", endpoint)
    s3.create_bucket(Bucket="stories")
    return site


class Incident:
    """A fleet that reads, and then all that goes wrong with it."""

    def __init__(self, folder, endpoint):
        self.folder = folder
        # Long enough for a machine on which other tests run, too.
        self.site = prepared_site(
            folder, endpoint, APPLICATION, SETTINGS, PROCESSOR, SHARDS, failover="5s"
        )
        self.machines = {}
        self._hot = self._is_cool = None

    def begin(self):
        """Three machines with two shards each, which are up to date."""
        for name in ("machine-a", "machine-b", "machine-c"):
            self.machines[name] = Machine(self.site, self.folder / name)
        until(self._is_even, timeout_s=HUNG_S)

    def _is_even(self):
        if not all(each.events("lease_claimed") for each in self.machines.values()):
            return False
        shares = [len(self.shards_of(name)) for name in self.machines]
        return shares == [SHARDS // 3] * 3

    def leases(self):
        return {lease.key: lease for page in self.site.aws.table.scan() for lease in page.leases}

    def shards_of(self, name):
        """The shards of a machine: by the nonce of its owner, which its log has."""
        started = self.machines[name].events("manager_started")
        owner = started[0]["owner"] if started else None
        return [key for key, lease in sorted(self.leases().items()) if lease.owner == owner]

    def owner_of(self, name):
        return self.machines[name].events("manager_started")[0]["owner"]

    def key_for(self, shard):
        """A partition key whose records go to the shard."""
        (found,) = [each for each in self.site.open_shards() if each.shard_id == shard]
        for number in itertools.count():
            value = int.from_bytes(hashlib.md5(f"customer-{number}".encode()).digest(), "big")
            if found.hash_range.start <= value <= found.hash_range.end:
                return f"customer-{number}"
        raise AssertionError

    def strike(self):
        """All four at once; the shards that they hit, by their names."""
        on_a, on_b, on_c = (self.shards_of(name) for name in self.machines)
        hit = {"stuck": on_b[0], "poison": on_a[0], "hot": on_a[1], "lost": on_c[0]}
        self.site.put([(self.key_for(hit["stuck"]), '{"amount": 7, "needs": "disk"}')])
        self.site.put([(self.key_for(hit["poison"]), '{"amount": "seven')])
        self.machines["machine-c"].lose()
        self._is_cool = threading.Event()
        self._hot = threading.Thread(target=self._heat, args=(self.key_for(hit["hot"]),))
        self._hot.start()
        return hit

    def _heat(self, key):
        """1.5 MB a second with one key, for a busy machine is late; and a trickle of the others."""
        numbers = itertools.count()
        others = [self.key_for(shard.shard_id) for shard in self.site.open_shards()]
        while not self._is_cool.wait(0.1):
            rows = [(key, "x" * 50_000)] * 3 + [(others[next(numbers) % len(others)], "x" * 100)]
            self.site.put(rows)

    def repair(self):
        """The next version of the processor is deployed: it takes such records."""
        (self.folder / "repaired").touch()

    def cool(self):
        """The producers spread the key."""
        if self._hot is not None:
            self._is_cool.set()
            self._hot.join()
            self._hot = None

    def close(self):
        self.cool()
        for machine in self.machines.values():
            machine.lose()


def host_slot(owner):
    return Owner.parse(owner).slot


class Clock:
    """What was seen and done, with the seconds since the incident began."""

    def __init__(self):
        self._began = time.monotonic()
        self.lines = []

    def note(self, words):
        self.lines.append((time.monotonic() - self._began, words))
