"""Kill a writer going flat out, again and again; say what the reader saw, as JSON.

    python killed_writers_rig.py KILLS SEED

Run as a process of its own, because it forks: a child takes over the place of its dead
predecessor and writes without pause; the parent reads, now and then falls asleep so that the ring
fills, and kills the child at a random instant. Each entry and each status is made from one number,
so that the reader can tell a mixture.
"""

import json
import os
import random
import select
import signal
import struct
import sys
import time

from kclrun.ipc.board import Segment
from kclrun.ipc.channel import Doorbell
from kclrun.ipc.seqlock import NoValue
from kclrun.model.sequence import ExtendedSequenceNumber
from kclrun.protocol.status import LeaseStatus, WorkerState

ENTRY = struct.Struct("<QQ")
RUN_MS_MAX = 30
DEADLINE_S = 90.0
# All bytes of a send differ from those of the next: a torn one would be neither.
SENDS = tuple(struct.unpack("<d", bytes([byte]) * 8)[0] for byte in (0x41, 0x3E))


def entry(incarnation: int, number: int) -> bytes:
    return ENTRY.pack(incarnation, number) + bytes([number & 0xFF]) * (number * 37 % 400)


def status(incarnation: int, number: int) -> LeaseStatus:
    position = ExtendedSequenceNumber(str(10**55 + number), number)
    return LeaseStatus(
        pid=number,
        incarnation=incarnation,
        state=WorkerState.PROCESSING,
        counter=number,
        records_total=number,
        fence_instant=float(number),
        fetched=position,
        first_delivered=position,
        last_batch_instant=float(number),
    )


def write_flat_out(fd: int, bell_fd: int, incarnation: int) -> None:
    segment = Segment.attach(fd)
    slot, ring, bell = segment.slot(1), segment.ring(1), Doorbell.for_writer(bell_fd)
    number = turns = 0
    while True:
        turns += 1
        slot.note_send(SENDS[turns & 1])
        slot.publish(status(incarnation, turns))
        if ring.put(entry(incarnation, number)):
            number += 1
            bell.press()


class Reader:
    def __init__(self) -> None:
        self.segment = Segment.create(3)
        self.slot, self.ring = self.segment.slot(1), self.segment.ring(1)
        self.faults: list[str] = []
        self.seen = dict.fromkeys(
            ("entries", "gap", "statuses", "unreadable", "incarnations", "entries_after_death"), 0
        )
        self.last = (0, -1)
        self.last_status = (0, 0)

    def look(self) -> int:
        payloads = self.ring.drain()
        for payload in payloads:
            self.check_entry(payload)
        self.seen["entries"] += len(payloads)
        self.seen["gap"] += self.ring.gap()
        self.check_status()
        if self.slot.last_send_instant() not in (0, *SENDS):
            self.faults.append(f"torn send {self.slot.last_send_instant()}")
        return len(payloads)

    def check_entry(self, payload: bytes) -> None:
        incarnation, number = ENTRY.unpack_from(payload)
        if payload != entry(incarnation, number):
            self.faults.append(f"torn entry {incarnation}/{number}")
        before, last = self.last
        follows = (incarnation, number) == (before, last + 1)
        begins = incarnation > before and number == 0
        if not follows and not begins:
            self.faults.append(f"entry {incarnation}/{number} after {before}/{last}")
        self.last = (incarnation, number)

    def check_status(self) -> None:
        seen = self.slot.read()
        if isinstance(seen, NoValue):
            self.seen["unreadable"] += seen is NoValue.UNREADABLE
            return
        self.seen["statuses"] += 1
        if seen != status(seen.incarnation, seen.pid):
            self.faults.append(f"torn status {seen}")
        now = (seen.incarnation, seen.pid)
        if now < self.last_status:
            self.faults.append(f"status {now} after {self.last_status}")
        self.last_status = now


def one_life(reader: Reader, bell: Doorbell, incarnation: int, chance: random.Random) -> None:
    bell.answer()
    pid = os.fork()
    if pid == 0:
        try:
            write_flat_out(reader.segment.fd, bell.write_fd, incarnation)
        finally:
            os._exit(1)  # reached only if the writer raised: its status is not SIGKILL
    select.select([bell], [], [], 5.0)
    killed_instant = time.monotonic() + chance.uniform(0, RUN_MS_MAX) / 1000
    sleepy = chance.random() < 0.3
    while time.monotonic() < killed_instant:
        bell.answer()
        if sleepy:
            time.sleep(0.002)
        else:
            reader.look()
    os.kill(pid, signal.SIGKILL)
    _, exit_status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(exit_status):
        reader.faults.append(f"the writer ended by itself with {exit_status}")
    while taken := reader.look():
        reader.seen["entries_after_death"] += taken
    if reader.seen["unreadable"] and isinstance(reader.slot.read(), NoValue):
        reader.faults.append(f"no status is left after the death of {incarnation}")
    reader.seen["incarnations"] += reader.last[0] == incarnation


def main(kills: int, seed: int) -> None:
    chance, reader, bell = random.Random(seed), Reader(), Doorbell.create()
    deadline = time.monotonic() + DEADLINE_S
    for incarnation in range(1, kills + 1):
        if time.monotonic() > deadline:
            reader.faults.append(f"not done after {DEADLINE_S} s, at kill {incarnation}")
            break
        one_life(reader, bell, incarnation, chance)
    print(json.dumps({"faults": reader.faults[:20], **reader.seen}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
