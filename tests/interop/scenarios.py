"""What is claimed of kclrun beside the real KCL, and of the embedded Kinesis under it.

Each scenario asserts, and gives its figures.

All but one take a version of the KCL. Times in figures are measured, not judged: limits only mean
that something hangs. Where a claim is about time itself ("no move for a minute") it says so.
"""

import contextlib
import time
from collections import Counter

from tests.interop.rig.peers import Rig
from tests.patience import HUNG_S

REST_S = 60


def hand_over(folder, version):
    """Both ways, from checkpoints inside aggregates: the next owner is given exactly the rest."""
    with Rig(folder, shards=2) as rig:
        figures = []
        rig.stream.put_aggregates(8)
        first = rig.kclrun("kclrun-1", checkpoint={"every": "manual"}, options={"hold_after": 137})
        first.start()
        rig.until_all_given()
        _until_held(rig, "kclrun-1")
        assert first.stop() == 0
        assert set(rig.owners().values()) == {None}, "kclrun leaves no owner behind"

        rest = _rest_inside_aggregates(rig)
        since = len(rig.ledger.given)
        java = rig.java(version, "java", holdAfter=111)
        took_s = rig.until(lambda: rig.ledger.given_to("java"), "Java reads")
        figures.append(f"Java's first record {took_s:.1f} s after its start")
        _until_exactly(rig, "java", since, rest)
        # What is put now is given to Java, and to the next owner again: it is not checkpointed.
        rig.stream.put_aggregates(2)
        rig.until_all_given()
        _until_held(rig, "java")
        java.stop()

        rest = _rest_inside_aggregates(rig)
        since = len(rig.ledger.read().given)
        rig.kclrun("kclrun-2").start()
        took_s = rig.until(lambda: rig.ledger.given_to("kclrun-2"), "kclrun reads")
        figures.append(f"kclrun's {took_s:.1f} s")
        _until_exactly(rig, "kclrun-2", since, rest)
        return [*figures, str(rig.verdict())]


def doubling(folder, version):
    """Each shard splits in a mixed fleet: Java's share of the children is left to it."""
    with Rig(folder, shards=4) as rig, _producing(rig) as producer:
        rig.kclrun().start()
        rig.until(lambda: _shares(rig) == {"kclrun": 4}, "kclrun has all")
        rig.java(version)
        even_s = rig.until(lambda: _is_even(rig, 2), "two each")
        figures = [f"two each after {even_s:.0f} s", *_doubled(rig, producer)]
        producer.stop()
        rig.until_all_given()
        return [*figures, str(rig.verdict())]


def several_streams(folder, version):
    """Two streams in one table, of one of which Java has a made-up creation, both sides by enhanced
    fan-out: what Java began at LATEST loses nothing between two kclrun workers, and a doubling
    leaves Java its share."""
    failover_s = 5
    with Rig(folder, shards=2, streams=2) as rig:
        properties = {"start": "LATEST", "fanOut": "true", "failoverMs": 1000 * failover_s}
        settings = {
            "start": "LATEST",
            "fetch": {"mode": "fan-out"},
            "leases": {"failover": f"{failover_s}s"},
        }
        java = rig.java(version, "java-1", **properties)
        made_s = rig.until(lambda: _shares(rig) == {"java": 4}, "Java has all")
        java.kill()
        checkpoints = {row["checkpoint"] for each in rig.streams for row in each.rows().values()}
        assert checkpoints == {"LATEST"}, "a record was read before any was put"

        kclrun = rig.kclrun("kclrun-1", **settings).start()

        def has_all():
            others = rig.stream.leases_of_no(rig.streams)
            assert not others, f"kclrun made leases beside those of Java: {others}"
            return _shares(rig) == {"kclrun": 4}

        taken_s = rig.until(has_all, "kclrun has all")
        assert kclrun.stop() == 0
        for stream in rig.streams:
            stream.put_singles(20)
        unread = rig.put()
        with _producing(rig) as producer:
            rig.kclrun("kclrun-2", **settings).start()
            read_s = rig.until(lambda: len(_shards_read(rig, "kclrun-2")) == 4, "each is read")
            # In order: what comes later shows that nothing before it comes any more. A lease that
            # Java left at LATEST begins at the moment of kclrun's take, not of each start.
            lost = unread.keys() - rig.ledger.records
            assert not lost, f"{len(lost)} of {len(unread)} put between two workers were skipped"
            figures = [
                f"Java has four shards of two streams after {made_s:.1f} s",
                f"kclrun {taken_s:.1f} s after a SIGKILL of Java",
                f"what was put between two kclrun workers is read after {read_s:.1f} s",
            ]

            rig.java(version, "java-2", **properties)
            figures.append(
                f"two each after {rig.until(lambda: _is_even(rig, 2), 'two each'):.0f} s"
            )
            figures += _doubled(rig, producer)
            figures.append(f"each child is read {_until_read(rig):.1f} s later")
            figures.append(_until_subscribed(rig))
            producer.stop()
        rig.until_all_given()
        consumers = [stream.consumer_count() for stream in rig.streams]
        assert consumers == [1, 1], "both sides share one registered consumer a stream"
        return [*figures, str(rig.verdict())]


def life(folder, version):
    """Eight shards: rest, splits and a merge, SIGKILL and SIGTERM of either side."""
    with Rig(folder, shards=8) as rig, _producing(rig) as producer:
        figures = []
        kclrun = rig.kclrun().start()
        rig.until(lambda: _shares(rig) == {"kclrun": 8}, "kclrun has all")
        java = rig.java(version)
        figures.append(f"even after {rig.until(lambda: _is_even(rig, 2), 'four each'):.0f} s")

        owners = rig.owners()
        rested_at = time.monotonic()
        while time.monotonic() < rested_at + REST_S:
            assert rig.owners() == owners, "a fleet at rest moved a lease"
            time.sleep(1)
        figures.append(f"no move in {REST_S} s")

        with producer.paused():
            rig.stream.split(0)
            rig.stream.split(4)
            rig.stream.merge(7)
        figures.append(f"two splits and a merge: children read after {_until_read(rig):.1f} s")
        rig.until(lambda: _is_even(rig, 2), "even again")

        java.kill()
        figures.append(f"SIGKILL of Java: {_until_all_with(rig, 'kclrun')}")
        java = rig.java(version)
        rig.until(lambda: _is_even(rig, 2), "even with Java again")
        kclrun.lose_power()
        figures.append(f"SIGKILL of kclrun: {_until_all_with(rig, 'java')}")
        kclrun.start()
        rig.until(lambda: _is_even(rig, 2), "even with kclrun again")
        asked_at = time.monotonic()
        java.stop()
        stop_s = time.monotonic() - asked_at
        figures.append(
            f"SIGTERM of Java: ended in {stop_s:.1f} s, {_until_all_with(rig, 'kclrun')}"
        )
        rig.java(version)
        rig.until(lambda: _is_even(rig, 2), "even with Java a third time")
        asked_at = time.monotonic()
        assert kclrun.stop() == 0
        stop_s = time.monotonic() - asked_at
        assert "kclrun" not in _shares(rig), "kclrun left an owner behind"
        figures.append(
            f"SIGTERM of kclrun: ended in {stop_s:.1f} s, {_until_all_with(rig, 'java')}"
        )
        producer.stop()
        rig.until_all_given()
        return [*figures, str(rig.verdict())]


def two_and_two(folder, version):
    """Two of each over 13 shards come to rest even, and stay there."""
    with Rig(folder, shards=13) as rig, _producing(rig) as producer:
        kclruns = [rig.kclrun(f"kclrun-{n}").start() for n in (1, 2)]
        # One after the other: of two 3.5.1 that start at once one ends itself after 20 tries
        # ("AssignmentMode is not initialized").
        for n in (1, 2):
            java = f"java-{n}"
            rig.java(version, java)
            rig.until(lambda java=java: java in rig.shares(), f"{java} has a lease")

        def is_even():
            counts = rig.shares()
            return None not in counts and sorted(counts.values()) == [3, 3, 3, 4]

        even_s = rig.until(is_even, "3, 3, 3 and 4")
        owners = rig.owners()
        rested_at = time.monotonic()
        while time.monotonic() < rested_at + REST_S:
            assert rig.owners() == owners, "a fleet at rest moved a lease"
            time.sleep(1)
        before = len(rig.ledger.read().given)
        assert kclruns[0].stop() == 0
        taken_s = rig.until(lambda: None not in rig.shares(), "each has an owner")
        producer.stop()
        rig.until_all_given()
        assert len(rig.ledger.given) > before
        return [
            f"even after {even_s:.0f} s, no move in {REST_S} s",
            f"after a SIGTERM of one kclrun all owned within {taken_s:.1f} s",
            str(rig.verdict()),
        ]


def cleanup_by_java(folder, version):
    """Java deletes the row of a parent; kclrun neither makes it again nor reads it again."""
    with Rig(folder, shards=2) as rig, _producing(rig) as producer:
        kclrun = rig.kclrun(leases={"cleanup": False}).start()
        rig.until(lambda: _shares(rig) == {"kclrun": 2}, "kclrun has both")
        java = rig.java(version, cleanupMs=2000)
        rig.until(lambda: _is_even(rig, 2), "one each")
        parent = next(s for s, o in rig.owners().items() if o == "java")
        figures = [f"gone after {_until_cleaned_up(rig, producer, parent):.0f} s"]
        java.stop()
        assert kclrun.stop() == 0
        kclrun.start()
        rig.java(version, "java-2", cleanupMs=2000)
        return figures + _never_again(rig, producer, parent)


def cleanup_by_kclrun(folder, version):
    """kclrun deletes the row of a parent; Java goes on, and so does one that starts later."""
    with Rig(folder, shards=2) as rig, _producing(rig) as producer:
        kclrun = rig.kclrun().start()
        rig.until(lambda: _shares(rig) == {"kclrun": 2}, "kclrun has both")
        java = rig.java(version)
        rig.until(lambda: _is_even(rig, 2), "one each")
        parent = next(s for s, o in rig.owners().items() if o != "java")
        figures = [f"gone after {_until_cleaned_up(rig, producer, parent):.0f} s"]
        java.stop()
        assert kclrun.stop() == 0
        kclrun.start()
        rig.java(version, "java-2")
        return figures + _never_again(rig, producer, parent)


def native_arrives(folder, version):
    """A KCL 3 in its native mode beside a running kclrun: it keeps its leases and says what is
    wrong; a restart is refused."""
    with Rig(folder, shards=4) as rig, _producing(rig) as producer:
        kclrun = rig.kclrun().start()
        rig.until(lambda: _shares(rig) == {"kclrun": 4}, "kclrun has all")
        native = {"compatible": "CLIENT_VERSION_CONFIG_3X"}
        is_kclpy = version == KCLPY
        peer = rig.kclpy(version, **native) if is_kclpy else rig.java(version, **native)
        rig.until(lambda: "CLIENT_VERSION_3X" in rig.stream.client_version(), "the table says it")
        rig.until(lambda: kclrun.of("kcl3_native"), "kclrun says so")
        assert {event["level"] for event in kclrun.of("kcl3_native")} == {"error"}
        runs = "Initialization complete. Starting worker loop."
        rig.until(
            lambda: (
                runs in peer.log_path.read_text() if is_kclpy else rig.ledger.of("started", "java")
            ),
            "the peer runs",
        )
        producer.stop()
        rig.until_all_given()
        assert _shares(rig) == {"kclrun": 4}, "a lease that kclrun renews was taken"
        assert kclrun.stop() == 0
        kclrun.start()
        assert kclrun.process.wait(HUNG_S) == 78
        who = "kclpy" if is_kclpy else "java"
        read_s = rig.until(lambda: _shares(rig) == {who: 4}, f"{who} has all")
        peer.stop()
        return [f"{who} has all {read_s:.1f} s after kclrun's stop", str(rig.verdict())]


def compat_alone(folder, version):
    """A compatible KCL 3 without kclrun for ten minutes goes over to its native mode; kclrun is
    refused then, in words, before any write."""
    with Rig(folder, shards=2) as rig, _producing(rig, every_s=5) as producer:
        kclrun = rig.kclrun().start()
        rig.until(lambda: _shares(rig) == {"kclrun": 2}, "kclrun has both")
        rig.java(version)
        assert kclrun.stop() == 0
        rig.until(lambda: _shares(rig) == {"java": 2}, "Java has both")
        flipped_s = rig.until(
            lambda: rig.stream.client_version() == "CLIENT_VERSION_3X_WITH_ROLLBACK",
            "it flips",
            1200,
        )
        owners = rig.owners()
        kclrun.start()
        assert kclrun.process.wait(HUNG_S) == 78
        assert rig.owners() == owners
        producer.stop()
        rig.until_all_given()
        return [f"flipped after {flipped_s:.0f} s", str(rig.verdict())]


def compat_beside(folder, version):
    """Beside a kclrun that holds a lease a compatible KCL 3 stays compatible, however long."""
    with Rig(folder, shards=4) as rig, _producing(rig, every_s=5) as producer:
        rig.kclrun().start()
        rig.until(lambda: _shares(rig) == {"kclrun": 4}, "kclrun has all")
        rig.java(version)
        rig.until(lambda: _is_even(rig, 2), "two each")
        # Without kclrun it goes over 640 to 660 s after its first look.
        until_at = time.monotonic() + 800
        while time.monotonic() < until_at:
            assert "3X" not in rig.stream.client_version()
            time.sleep(5)
        producer.stop()
        rig.until_all_given()
        return ["stayed compatible for 800 s", str(rig.verdict())]


def kclpy_daemon(folder, version):
    """amazon_kclpy's daemon joins, goes on alone, shares again, and stops."""
    with Rig(folder, shards=4) as rig, _producing(rig) as producer:
        figures = []
        kclrun = rig.kclrun().start()
        rig.until(lambda: _shares(rig) == {"kclrun": 4}, "kclrun has all")
        daemon = rig.kclpy(version)
        figures.append(f"two each after {rig.until(lambda: _is_even(rig, 2), 'two each'):.0f} s")
        assert kclrun.stop() == 0
        figures.append(f"SIGTERM of kclrun: {_until_all_with(rig, 'kclpy')}")
        kclrun.start()
        rig.until(lambda: _is_even(rig, 2), "two each again")
        asked_at = time.monotonic()
        daemon.stop()
        stop_s = time.monotonic() - asked_at
        figures.append(
            f"SIGTERM of the daemon: ended in {stop_s:.1f} s, {_until_all_with(rig, 'kclrun')}"
        )
        producer.stop()
        rig.until_all_given()
        return [*figures, str(rig.verdict())]


def fan_out(folder, version):
    """Java reads the embedded Kinesis by enhanced fan-out, its default, through splits and a merge
    and a change of owner."""
    with Rig(folder, shards=4) as rig, _producing(rig, every_s=0.1) as producer:
        java = rig.java(version, "java-1", fanOut="true")
        first_s = rig.until(lambda: rig.ledger.given_to("java-1"), "Java reads")
        assert rig.stream.consumer_count() == 1, "the KCL registers one consumer"
        with producer.paused():
            rig.stream.split(0)
            rig.stream.split(4)
            rig.stream.merge(2)
        figures = [
            f"Java's first record {first_s:.1f} s after its start",
            f"two splits and a merge: children read after {_until_read(rig):.1f} s",
        ]
        rig.java(version, "java-2", fanOut="true")
        shared_s = rig.until(lambda: "java-2" in rig.shares(), "the second has a lease")
        java.stop()
        moved_s = rig.until(lambda: rig.shares().keys() == {"java-2"}, "it has all")
        producer.stop()
        rig.until_all_given()
        figures.append(f"shared after {shared_s:.0f} s, moved {moved_s:.0f} s after a SIGTERM")
        return [*figures, str(rig.verdict())]


KCLPY = "3.1.3"

# What each is run with. The long ones last ten minutes and more.
SCENARIOS = {
    "hand-over": (hand_over, ("2.7.2", "3.5.1")),
    "doubling": (doubling, ("2.7.2", "3.5.1")),
    "life": (life, ("2.7.2", "3.5.1")),
    "two-and-two": (two_and_two, ("2.7.2", "3.5.1")),
    "cleanup-by-java": (cleanup_by_java, ("2.7.2", "3.5.1")),
    "cleanup-by-kclrun": (cleanup_by_kclrun, ("2.7.2", "3.5.1")),
    "native-arrives": (native_arrives, ("3.5.1", KCLPY)),
    "compat-alone": (compat_alone, ("3.5.1",)),
    "compat-beside": (compat_beside, ("3.5.1",)),
    "fan-out": (fan_out, ("2.7.2", "3.5.1")),
    "several-streams": (several_streams, ("2.7.2", "3.5.1")),
    "kclpy": (kclpy_daemon, (KCLPY,)),
}
# What `bin/prove night` does: claims that hold however slow the machine is.
SHARE = tuple(
    (name, version) for name in ("hand-over", "several-streams") for version in ("2.7.2", "3.5.1")
)


@contextlib.contextmanager
def _producing(rig, every_s=0.5):
    producer = rig.producer(every_s)
    try:
        yield producer
    finally:
        producer.stop()


def _shares(rig):
    """How many open shards' leases kclrun, Java and no worker (`None`) has."""
    shares = Counter()
    for owner in rig.owners().values():
        shares[owner and owner.partition(":")[0].partition("-")[0]] += 1
    return shares


def _is_even(rig, workers):
    """Each shard has an owner, and no owner has two more than another."""
    counts = rig.shares()
    return (
        None not in counts
        and len(counts) == workers
        and max(counts.values()) - min(counts.values()) <= 1
    )


def _doubled(rig, producer):
    """Each of four shards splits, two of them Java's: its share of the children is left to it."""
    lost = len(_lost_by_java(rig))
    with producer.paused():
        for stream in rig.streams:
            stream.double()
    most = 0

    def all_owned():
        nonlocal most
        shares = _shares(rig)
        most = max(most, shares["kclrun"])
        return shares["kclrun"] + shares["java"] == 8

    owned_s = rig.until(all_owned, "each child has an owner")
    at_first = _shares(rig)
    # An owner of only ended leases still counts as an owner while it renews them: without that rule
    # kclrun takes 7 of the 8, and Java steals them back one by one. A JVM that stood still for a
    # failover has lost leases by itself, which is not judged.
    assert most <= 6 or len(_lost_by_java(rig)) > lost, f"kclrun took {most} of 8 children"
    evened_s = rig.until(lambda: _is_even(rig, 2), "four each")
    return [
        f"children owned after {owned_s:.0f} s: {_reported(at_first)}",
        f"four each {evened_s:.0f} s later",
    ]


def _shards_read(rig, who):
    return {shard for _, shard, _, _ in rig.ledger.given_to(who)}


def _until_subscribed(rig):
    """By the record of Kinesis, until each side has subscribed to each open shard that it owns."""

    def is_all():
        taken, sides = rig.world.subscriptions(), set()
        for shard, owner in rig.owners().items():
            side = str(owner).partition(":")[0].partition("-")[0]
            sides.add(side)
            if shard not in taken.get(side, ()):
                return False
        return sides == {"kclrun", "java"}

    rig.until(is_all, "each owner has subscribed to what it owns")
    counts = {side: len(shards) for side, shards in rig.world.subscriptions().items()}
    return f"shards that each side subscribed to: {counts}"


def _lost_by_java(rig):
    return [mark for mark in rig.ledger.of("lost") if mark["who"].startswith("java")]


def _reported(shares):
    return ", ".join(f"{who} {count}" for who, count in sorted(shares.items()))


def _until_held(rig, who):
    rig.until(lambda: len(rig.ledger.of("checkpointed", who)) >= 2, f"{who} has checkpointed")


def _rest_inside_aggregates(rig):
    """What was put behind the checkpoints, each of which is within an aggregate."""
    rows = rig.stream.rows()
    at = {
        shard: (int(row["checkpoint"]), int(row["checkpointSubSequenceNumber"]))
        for shard, row in rows.items()
    }
    assert len(at) == 2, at
    assert all(0 < sub < 49 for _, sub in at.values()), at
    return {record for record, (shard, place) in rig.stream.put.items() if place > at[shard]}


def _until_exactly(rig, who, since, expected):
    rig.until(lambda: len(rig.ledger.given_to(who, since)) >= len(expected), f"{who} has the rest")
    given = [record for _, _, _, record in rig.ledger.given_to(who, since)]
    assert sorted(given) == sorted(expected), f"{who} was given more or less than the rest"


def _until_read(rig):
    """Until what is put from now on, to each open shard, was given."""
    before = [len(stream.put) for stream in rig.streams]
    rig.until(
        lambda: all(
            len(stream.put) > count for stream, count in zip(rig.streams, before, strict=True)
        ),
        "more is put",
    )
    wanted = {record for stream in rig.streams for record in list(stream.put)}
    return rig.until(lambda: wanted <= rig.ledger.records, "each shard is read")


def _until_all_with(rig, who):
    everything = len(rig.stream.open_shards())
    owned_s = rig.until(lambda: _shares(rig) == {who: everything}, f"{who} has all")
    return f"{who} owns all after {owned_s:.1f} s, reads all {_until_read(rig):.1f} s later"


def _until_cleaned_up(rig, producer, parent):
    with producer.paused():
        rig.stream.split([s["ShardId"] for s in rig.stream.open_shards()].index(parent))
    return rig.until(lambda: parent not in rig.stream.rows(), "the parent's row is deleted")


def _never_again(rig, producer, parent):
    """Both sides go on, and nothing of the parent comes back."""
    began = len(rig.ledger.of("began"))
    rig.until(lambda: len(rig.ledger.of("began")) > began, "a worker begins")
    _until_read(rig)
    producer.stop()
    rig.until_all_given()
    assert parent not in rig.stream.rows(), "the parent's row was made again"
    assert parent not in {mark["shard"] for mark in rig.ledger.of("began")[began:]}
    return [str(rig.verdict())]
