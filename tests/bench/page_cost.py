"""Row `page`: what the page costs a server, and what the page and `kclrun top` cost where they run,
at 1,000 shards."""

import io
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final
from urllib.request import urlopen

import msgspec
from rich.console import Console

from bench.figures import Figure, Target, figure
from bench.measuring import timed
from kclrun.aws.operations import Operation
from kclrun.aws.table_setup import ensure_table
from kclrun.aws.wire import WireClient
from kclrun.cli.config_options import ConfigChoice
from kclrun.cli.page.command import BESIDE_A_MANAGER_S, page_beside_run
from kclrun.cli.page.reading import FleetReader
from kclrun.cli.page.top import render_fleet
from kclrun.cli.services import Aws
from kclrun.config.load import settings_of
from kclrun.local.filling import wait_until_active
from kclrun.local.server import start_embedded
from kclrun.model.lease import Lease, LeaseKey, Load, OwnerId
from kclrun.model.sequence import TRIM_HORIZON
from kclrun.model.time import Instant, WallTime
from kclrun.observe.members import LastErrors, detail_of
from kclrun.observe.sample import LeaseSample, ManagerSample
from kclrun.page.lag_history import measured_every_s
from kclrun.page.server import routes
from kclrun.page.snapshot import About
from kclrun.protocol.writes import CreateLease

_ROW: Final = "page"
_SHARDS: Final = 1_000
_EVERY_S: Final = 10.0
_DETAIL_EVERY_S: Final = 5.0
_TARGET: Final = Target(at_most=200.0)
_SHARE: Final = Target(at_most=1.0)
_ABOUT: Final = About(
    application="bench",
    streams="bench",
    table="bench",
    place="here",
    leases_command="kclrun leases",
    doctor_command="kclrun doctor",
    letters_command="kclrun dead-letters",
)


def page_cost(rounds: int) -> list[Figure]:
    """CPU of this process alone: the embedded AWS has processes of its own.

    A share of a core is the CPU of one reading or one answer over the time in which there is one:
    the table each 10 s, the lag each 150 s (`measured_every_s`), a page each 10 s for one viewer,
    the detail of a shard each 5 s at its owner. What a manager serves is measured as it lives: all
    of it and one viewer, from one measurement of the lag to the next. Writes to DynamoDB are
    counted over all of it.
    """
    with start_embedded() as embedded:
        aws = _prepared(embedded.endpoint)
        written = _count_writes()
        reader = FleetReader(aws, every_s=_EVERY_S)
        tables = [timed(partial(_done, reader.read_table)).cpu_s for _ in range(rounds)]
        lags = [timed(partial(_done, reader.read_lags)).cpu_s for _ in range(min(rounds, 3))]
        look = reader.look
        paths = routes(_ABOUT, look)
        shards = [timed(lambda: float(len(paths["/shards"]({}).body))).cpu_s for _ in range(rounds)]
        fleets = [timed(lambda: float(len(paths["/"]({}).body))).cpu_s for _ in range(rounds)]
        screen = Console(width=200, file=io.StringIO())

        def drawn() -> None:
            shown = render_fleet(aws.settings, look(), sort="urgency", every_s=_EVERY_S, height=50)
            screen.print(shown)

        tops = [timed(partial(_done, drawn)).cpu_s for _ in range(rounds)]
        reader.close()
        lived = _lived(embedded.endpoint)
    every_lag_s = measured_every_s(_EVERY_S, _SHARDS)
    return [
        figure(_ROW, "all 1,000 shards", "ms", _ms(shards), target=_TARGET),
        figure(_ROW, "the fleet of 1,000", "ms", _ms(fleets), target=_TARGET),
        figure(_ROW, "reading the table", "% of a core", _share(tables, _EVERY_S), target=_SHARE),
        figure(_ROW, "reading the lag", "% of a core", _share(lags, every_lag_s), target=_SHARE),
        figure(_ROW, "beside a manager, lived", "% of a core", [lived], target=_SHARE),
        figure(_ROW, "one viewer", "% of a core", _share(shards, _EVERY_S), target=_SHARE),
        figure(_ROW, "top, drawn", "% of a core", _share(tops, _EVERY_S), target=_SHARE),
        figure(
            _ROW,
            "an owner, asked for one shard",
            "% of a core",
            _share(_asked(rounds), _DETAIL_EVERY_S),
            target=_SHARE,
        ),
        figure(_ROW, "writes to DynamoDB", "", [float(len(written))], target=Target(at_most=0.0)),
    ]


def _text(endpoint: str) -> str:
    return (
        "application: bench\nstream: bench\nprocessor: kclrun.samples.hello:Hello\n"
        f"aws: {{region: us-east-1, endpoint: '{endpoint}', start_timeout: 5s}}\n"
    )


def _lived(endpoint: str) -> float:
    """The page beside a manager, with one viewer: percents of a core, over its whole pace."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "app.yaml")
        config.write_text(_text(endpoint))
        configuration = ConfigChoice(config, ("observe.page=0",)).load()
        with page_beside_run(configuration) as url:
            assert url is not None
            began, cpu_s = time.monotonic(), _cpu_of_others_s()
            over = began + measured_every_s(BESIDE_A_MANAGER_S, _SHARDS)
            while (left_s := over - time.monotonic()) > 0:
                with urlopen(f"{url}/shards") as answer:
                    answer.read()
                time.sleep(min(BESIDE_A_MANAGER_S, left_s))
            return (_cpu_of_others_s() - cpu_s) / (time.monotonic() - began) * 100


def _cpu_of_others_s() -> float:
    """Of all threads but this one, which is the viewer."""
    return time.process_time() - time.thread_time()


def _prepared(endpoint: str) -> Aws:
    aws = Aws(settings_of(_text(endpoint), environment={}, now=WallTime(time.time())))
    create = Operation("kinesis", "CreateStream", is_write=True)
    request = {"StreamName": "bench", "ShardCount": _SHARDS}
    aws.kinesis_client.call(create, msgspec.json.encode(request))
    wait_until_active(aws.stream)
    ensure_table(
        aws.control,
        "bench",
        application="bench",
        create=True,
        tags={},
        clock=lambda: Instant(time.monotonic()),
        wait=time.sleep,
        timeout_s=60.0,
    )
    for number in range(_SHARDS):
        aws.table.write(
            CreateLease(
                Lease(
                    key=LeaseKey(f"shardId-{number:012d}"),
                    checkpoint=TRIM_HORIZON,
                    owner=OwnerId(f"kclrun:az{number % 3}:host{number % 20}:nonce"),
                    load=Load(90.0 + number % 7, 0.01),
                )
            )
        )
    return aws


def _count_writes() -> list[str]:
    """The names of the writes that any client of this process sends from now on."""
    written: list[str] = []
    ask = WireClient.ask

    def noting(client: WireClient, operation: Operation, *more: object, **named: object) -> object:
        if operation.is_write:
            written.append(operation.name)
        return ask(client, operation, *more, **named)

    WireClient.ask = noting
    return written


def _asked(rounds: int) -> list[float]:
    """The CPU of a manager of 64 leases for one answer of `/lease`."""
    leases = tuple(LeaseSample(shard=f"shardId-{n:012d}", state="running") for n in range(64))
    sample = ManagerSample(application="bench", stream="x", owner="o", uptime_s=1.0, leases=leases)
    errors = LastErrors()
    for number in range(5):
        fields = {"error": f"E{number}", "traceback": "x" * 8_000}
        errors.note("processor_failed", leases[-1].shard, fields)

    def answer() -> float:
        shard = leases[-1].shard
        return float(len(msgspec.json.encode(detail_of(sample, shard, errors.of(shard)))))

    return [timed(answer).cpu_s for _ in range(rounds)]


def _done(call: Callable[[], object]) -> float:
    call()
    return 1.0


def _ms(spent: list[float]) -> list[float]:
    return [each * 1_000 for each in spent]


def _share(spent: list[float], every_s: float) -> list[float]:
    return [each / every_s * 100 for each in spent]
