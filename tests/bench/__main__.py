"""`bin/bench`: which rows there are, and running them."""

import argparse
import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.figures import Figure, NotMeasured
from bench.report import MEASURED, SECTIONS
from bench.showing import machine, show

__all__ = ["main"]


class Row(msgspec.Struct, frozen=True):
    """A row by name: what it is, where its function is, how many rounds by default.

    `takes`: the options that its function takes, too; each None where it is not given.
    """

    name: str
    about: str
    function: str
    rounds: int
    takes: tuple[str, ...] = ()

    def load(self, options: Mapping[str, Any]) -> Callable[[int], list[Figure | NotMeasured]]:
        module, _, function = self.function.partition(":")
        loaded: Callable[..., list[Figure | NotMeasured]] = getattr(import_module(module), function)
        return partial(loaded, **{name: options[name] for name in self.takes})


ROWS: Final = {
    row.name: row
    for row in (
        Row(
            "fetch",
            "fetch + decode of 10k x 200 B: ≥ 20 x stock boto3, ≤ 1.25 x the floor's CPU",
            "bench.record_path:fetch",
            25,
        ),
        Row(
            "aggregates",
            "40 x 50 kB aggregates, HTTP to list: ≥ 4.5 x boto3 + aws_kinesis_agg",
            "bench.record_path:aggregates",
            25,
        ),
        Row(
            "runtime",
            "fetch to no-op processor to checkpoint, one lease: ≥ 0.8 x the bare loop",
            "bench.runtime:runtime",
            11,
        ),
        Row(
            "replay",
            "a replay of a time range by keys: ≥ 0.9 x the fleet's lease; its story ≤ 0.1 % of it",
            "bench.runtime:replay",
            9,
        ),
        Row(
            "records",
            "single records: async, 20 keys ≥ 10 x one at a time, 200 keys ≥ 40 x; ≤ 1.5 µs a call",
            "bench.single_records:records",
            3,
        ),
        Row(
            "hot-keys",
            "measuring the keys of a shard: ≤ 1 % of the CPU of reading it",
            "bench.hot_keys:hot_keys",
            15,
        ),
        Row(
            "idle",
            "100 idle leases: ≤ 10 % of a core, ≤ 7 MB, TLS + 0.5 MB; 16 a process: ≤ 6 %, ≤ 1.5",
            "bench.processes:idle",
            3,
        ),
        Row(
            "start",
            "a lease process to its first GetRecords; 8 over TLS ≤ 1.25 x the CPU over HTTP",
            "bench.processes:start",
            40,
        ),
        Row(
            "local",
            "embedded Kinesis: GetRecords ≥ 40 MB/s of 1 KB records, PutRecords ≥ 20 k records/s",
            "bench.embedded:local",
            5,
        ),
        Row(
            "plan",
            "a manager's plan for 10,000 leases of 1,000 owners: ≤ 50 ms",
            "bench.lease_plan:plan_time",
            15,
        ),
        Row(
            "page",
            "the page of 1,000 shards: ≤ 200 ms; the page and top: ≤ 1 % of a core, no write",
            "bench.page_cost:page_cost",
            9,
        ),
        Row(
            "simulation",
            "3 owners, 8 shards in virtual time, all oracles on: ≥ 100 fleet-hours/min/core",
            "bench.simulation:simulation",
            9,
        ),
        Row(
            "large-fleet",
            "200 owners, 2,000 shards, ten virtual minutes: ≤ 1 minute",
            "bench.simulation:large_fleet",
            1,
        ),
        Row(
            "crash",
            "SIGKILL of a lease process to its next batch: p99 ≤ 0.5 s (rounds: kills)",
            "bench.crash:crash",
            60,
        ),
        Row(
            "latency",
            "put → process_records: fan-out p50 ≤ 30 ms, p99 ≤ 100 ms; CPU/MB ≤ polling's",
            "bench.latency:latency",
            3,
        ),
        Row(
            "consumers",
            "five applications of one shard at 0.9 MB/s, under limits: fan-out p99 ≤ 1 s",
            "bench.latency:consumers",
            3,
        ),
        Row(
            "fleet",
            "planned move: p50 ≤ 0.4 s, p99 ≤ 0.8 s; host lost: p99 ≤ failover + 5 s; requests",
            "bench.fleet:fleet",
            2,
        ),
        Row(
            "state-moves",
            "a planned move of a lease with 100 MB of state, prefetched: p99 ≤ 2 s",
            "bench.state_moves:state_moves",
            20,
        ),
        Row(
            "sink",
            "Kinesis producer: cost against boto3; a hot shard: healthy ones ≥ 90 % of their rate",
            "bench.sink:sink",
            5,
        ),
        Row(
            "outputs",
            "k rows/s/core: JSON lines to S3 ≥ 400, Parquet ≥ 250, PostgreSQL ≥ 60, Kinesis ≥ 100",
            "bench.outputs:outputs",
            7,
        ),
        Row(
            "state",
            "1 M keys x 100 B: ≥ 150 k updates/s/core; a commit ≤ 60 ms; restored at ≥ 50 MB/s",
            "bench.keyed_state:state",
            5,
        ),
        Row(
            "poison",
            "one record at fault of 10,000: found in ≤ 15 calls, others done once more at most",
            "bench.poison:poison",
            20,
        ),
        Row(
            "spark-source",
            "Spark, fetch and decode to a no-op sink: ≥ 500 k rows/s/core at 200 B; memory",
            "bench.spark_source:source",
            3,
        ),
        Row(
            "spark-planning",
            "what a trigger waits, 1, 8, 100 shards: ≤ 60 ms at 100 (rounds: triggers)",
            "bench.spark_planning:planning",
            10,
        ),
        Row(
            "spark-reshard",
            "a look after every shard was split: ≤ 300 ms of CPU at 1,000 shards, ≤ 3 s at 10,000",
            "bench.spark_reshard:resharded",
            3,
        ),
        Row(
            "spark-lag",
            "from putting a record to having its row, polls of 1 s and 0.5 s, fan-out",
            "bench.spark_lag:lag",
            2,
        ),
        Row(
            "producer",
            "kclrun.Producer over TLS: aggregates ≥ 5 x boto3's put_records; at the shards' limits",
            "bench.producer:producer",
            5,
        ),
        Row("spark-sink", "Spark's rows into a stream", "bench.spark_sink:sink", 3),
        Row(
            "spark-whole",
            "a Spark program with its start, 3 M and 30 M rows: ≥ 3 x awslabs' connector",
            "bench.spark_whole:whole",
            1,
            takes=("awslabs_jar", "rows_counted"),
        ),
        Row(
            "peers",
            "one stream by kclrun, boto3, async-kinesis, amazon_kclpy: CPU of the whole program",
            "bench.peers:peers",
            3,
        ),
    )
}
# What a name stands for that is no row's own.
GROUPS: Final = {"spark": tuple(name for name in ROWS if name.startswith("spark-"))}


def main(arguments: list[str]) -> int:
    """0 when all was measured, met or not, but for what this machine does not have; 1 when a row
    failed."""
    asked = _parsed(arguments)
    facts = machine()
    _say(" ".join(f"{name}={value}" for name, value in facts.items()))
    results: list[Figure | NotMeasured] = []
    for name in asked.rows:
        results += _measured(ROWS[name], asked.rounds, vars(asked))
    show(results)
    if asked.json is not None:
        _write(asked.json, facts, results)
    if asked.report:
        _write(MEASURED, facts, results)
        # Every generated table of docs/ is written by one program.
        root = MEASURED.parents[2]
        subprocess.run([sys.executable, "-P", "-m", "tests.docs"], cwd=root, check=True)
    return int(any(isinstance(each, NotMeasured) and not each.is_left_out for each in results))


def _parsed(arguments: list[str]) -> argparse.Namespace:
    lines = [f"  {row.name:<14} {row.about}" for row in ROWS.values()]
    lines += [f"  {name:<14} {', '.join(names)}" for name, names in GROUPS.items()]
    rows = "\n".join(lines)
    parser = argparse.ArgumentParser(
        prog="bin/bench",
        description="Measure this checkout against named things, on this machine, now.",
        epilog=f"rows:\n{rows}\n\nRatios travel between machines, rates do not.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="all of them if none is named")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of each row")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    parser.add_argument(
        "--report", action="store_true", help="write the tables of docs/explanation/how-fast.md"
    )
    parser.add_argument(
        "--awslabs-jar",
        type=Path,
        metavar="FILE",
        help="the connector that spark-whole runs beside",
    )
    parser.add_argument(
        "--rows-counted",
        type=int,
        nargs=2,
        metavar=("FEW", "MANY"),
        help="the sizes of spark-whole, in rows; 3000000 30000000 if not given",
    )
    asked = parser.parse_args(arguments)
    unknown = sorted(set(asked.rows) - {*ROWS, *GROUPS})
    if unknown:
        there = ", ".join([*ROWS, *GROUPS])
        parser.error(f"no such row: {', '.join(unknown)} (there are {there})")
    named = [each for name in asked.rows for each in GROUPS.get(name, (name,))]
    if asked.report and named:
        parser.error("--report: it has rows of its own")
    asked.rows = list(dict.fromkeys(named or (SECTIONS if asked.report else ROWS)))
    if asked.rows_counted is not None and not 0 < asked.rows_counted[0] < asked.rows_counted[1]:
        parser.error("--rows-counted: two numbers above 0, the smaller first")
    if asked.rounds is not None and asked.rounds < 1:
        parser.error("--rounds: at least 1")
    return asked


def _measured(
    row: Row, rounds: int | None, options: Mapping[str, Any]
) -> list[Figure | NotMeasured]:
    _say(f"{row.name}: {row.about} …")
    began = time.monotonic()
    try:
        figures: list[Figure | NotMeasured] = [*row.load(options)(rounds or row.rounds)]
    except Exception as error:
        # A row that fails is reported, and the others still run.
        traceback.print_exc()
        return [NotMeasured(row.name, f"{type(error).__name__}: {error}")]
    _say(f"{row.name}: {time.monotonic() - began:.0f} s")
    return figures


def _write(path: Path, facts: dict[str, object], results: list[Figure | NotMeasured]) -> None:
    figures = [result.as_json() for result in results if isinstance(result, Figure)]
    missing = [msgspec.to_builtins(each) for each in results if isinstance(each, NotMeasured)]
    on = time.strftime("%Y-%m-%d", time.gmtime())
    document = {"measured_on": on, "machine": facts, "figures": figures, "not_measured": missing}
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _stop(*_: object) -> None:
    """As Ctrl-C does: leave through every `finally`, so that no server is left behind."""
    raise SystemExit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main(sys.argv[1:]))
