"""Small decisions of verbs: what `simulate` prints and repeats, clients, signals, messages."""

import contextlib
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec
import pytest

from kclrun import cli
from kclrun.aws import patience
from kclrun.cli import check, exit_codes, iam, local, messages, services, simulate, startup, tail
from kclrun.cli.program import program, run_program
from kclrun.cli.times import GivenTime
from kclrun.config.load import settings_of
from kclrun.config.units import StartPosition
from kclrun.errors import AccessDenied, NotFound, SettingsError, Throttled, Unavailable
from kclrun.local.server import NewStreams
from kclrun.model.record import Record
from kclrun.model.retries import Retries
from kclrun.model.sequence import LATEST
from kclrun.model.text import some_of
from kclrun.model.time import Instant, WallTime
from kclrun.ports import StreamSummary
from kclrun.reading.readers import Arrived, Ended, EveryShardBegan, Trouble
from kclrun.simulation import what_if
from kclrun.simulation.what_if import Figures, PhaseFigures, Series, WhatIf
from kclrun.simulation.world import FleetSettings
from tests.support.tables import over_rows
from tests.unit.cli.memory_site import Clock

LEAST = "application: orders\nstream: orders\nprocessor: a:B\naws: {region: us-east-1}\n"


def settings(text: str = LEAST) -> Any:
    return settings_of(text, environment={}, now=WallTime(1_780_000_000.0))


# simulate


def phase(name: str, began_s: float, **more: Any) -> PhaseFigures:
    fields = {
        "balanced_after_s": 12.25,
        "gaps": 3,
        "gap_p50_s": 0.5,
        "gap_p99_s": 1.0,
        "gap_max_s": None,
        "moves": 7,
        "duplicates": 2,
        "write_units": 60.0,
        "read_units": 240.0,
    }
    return PhaseFigures(name=name, began_s=began_s, **(fields | more))


FIGURES = Figures(
    phases=(phase("cold start", 0.0), phase("rolling deploy", 60.0, balanced_after_s=None)),
    workers=4,
    shards=10,
    shards_per_owner_min=2,
    shards_per_owner_max=3,
    shards_per_owner_even=2.5,
    records=600,
    duplicates=4,
    moves=14,
    write_units=120.0,
    read_units=480.0,
    virtual_s=90.0,
    events=1,
    load_by_counts=None,
    series=Series(load_greatest=[3.0, 1.25], load_least=[1.5, 1.125]),
)


SUM = "10 shards, 4 workers: 2 to 3 each (even: 2.5); 600 records, 4 repeated"
USUAL = "--skew 0 --balance load --failover 10s --idle 5s --leases-max 64"
UNUSUAL = "--skew 1.5 --balance counts --failover 3s --idle 1s --leases-max 9"
BEFALLS = "--lose-group b --deploy rolling --reshard halve"
TEN = "--for 10m --records-per-second"
OTHERS = "--for 2m --records-per-second 9 --record-bytes 5"


def test_figures_are_a_line_for_each_event_and_a_sum(capsys):
    simulate._print(FIGURES)
    assert capsys.readouterr().out.splitlines() == [
        "what            balanced after  gaps  p50    p99    max  moves  repeated  WCU/s  RCU/s",
        "cold start      12.2s           3     0.50s  1.00s  -    7      2         1.0    4.0",
        "rolling deploy  not yet         3     0.50s  1.00s  -    7      2         2.0    8.0",
        "",
        f"{SUM}; I1 to I8 and I11 held for 1.5 minutes",
    ]
    simulate._print(msgspec.structs.replace(FIGURES, load_by_counts=4.0))
    assert capsys.readouterr().out.splitlines()[-1] == (
        "the largest load of a worker: 4.00 of the mean with even counts, 1.25 at the end; even"
        " counts allow 1.12"
    )


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        (
            "--shards 12",
            f"--seed 1 --workers 3 --groups 1 --shards 12 {TEN} 120 --record-bytes 200 {USUAL}",
        ),
        (
            f"--shards 8 --group-sizes 4,2 --seed 7 {OTHERS} {UNUSUAL} {BEFALLS}",
            f"--seed 7 --group-sizes 4,2 --shards 8 {OTHERS} {UNUSUAL} {BEFALLS}",
        ),
        (
            "--workers 7 --groups 3 --shards 1",
            f"--seed 1 --workers 7 --groups 3 --shards 1 {TEN} 10 --record-bytes 200 {USUAL}",
        ),
    ],
)
def test_a_run_can_be_repeated_by_its_line(line, asked, monkeypatch, capsys):
    seen: list[tuple[WhatIf, str]] = []

    def run(asked: WhatIf, replay: str) -> Figures:
        seen.append((asked, replay))
        return FIGURES

    monkeypatch.setattr(what_if, "run_what_if", run)
    assert run_program(["simulate", *line.split(), "--json"]) == 0
    [(parsed, replay)] = seen
    assert replay == f"kclrun simulate {asked}"
    answer = json.loads(capsys.readouterr().out)
    assert (answer["workers"], answer["asked"]["shards"]) == (4, parsed.shards)
    assert run_program(["simulate", *line.split()]) == 0
    assert capsys.readouterr().out.startswith("what ")
    assert isinstance(parsed.settings, FleetSettings)


@over_rows(
    ("given", "sizes"),
    [
        ((None, None, None), (3,)),
        ((None, 2, None), (2, 1)),
        ((None, 3, 3), (1, 1, 1)),
        ((None, 3, 8), (3, 3, 2)),
        (("4, 2", None, None), (4, 2)),
        (("1999,1", None, None), (1999, 1)),
        ((",".join("1" * 26), None, None), (1,) * 26),
    ],
)
def test_workers_are_dealt_out_to_their_groups(given, sizes):
    assert simulate._group_sizes(*given) == sizes


@pytest.mark.parametrize(
    "given", [(None, 4, 3), ("2", 1, None), ("2", None, 2), ("2000,1", None, None)]
)
def test_numbers_that_do_not_fit_are_refused(given):
    with pytest.raises(click.UsageError):
        simulate._group_sizes(*given)


# Options, and what help says of them


def commands(group: click.Group, path: str) -> Any:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")


def test_every_option_is_that_of_the_golden_file():
    """What help does not show, too. KCLRUN_GOLDEN=write writes it again."""
    lines = []
    for path, command in commands(program, "kclrun"):
        context = click.Context(command, info_name=path)
        for each in command.params:
            names = "/".join([*each.opts, *each.secondary_opts])
            shown = each.get_help_record(context) if isinstance(each, click.Option) else None
            said = shown[1].rpartition("[")[2] if shown and shown[1].endswith("]") else ""
            lines.append(
                f"{path} {names} {each.nargs} {'required ' * each.required}"
                f"{'repeatable ' * getattr(each, 'multiple', False)}{said}".rstrip()
            )
    golden = Path(__file__).parent / "golden" / "options"
    text = "\n".join(lines) + "\n"
    if os.environ.get("KCLRUN_GOLDEN") == "write":
        golden.write_text(text)
    assert text == golden.read_text()


# The clients of these settings


@pytest.mark.parametrize(
    ("watch", "endpoint", "found", "expected"),
    [
        ("auto", None, "imds", "imds"),
        ("auto", "http://127.0.0.1:1", "imds", None),
        ("on", "http://127.0.0.1:1", "imds", "imds"),
        ("off", None, "imds", None),
        ("auto", None, None, None),
        ("on", None, None, SettingsError),
    ],
)
def test_instance_metadata_are_read_where_a_group_may_stop_the_machine(
    monkeypatch, watch, endpoint, found, expected
):
    monkeypatch.setattr(services, "open_imds", lambda *_: found)
    there = "" if endpoint is None else f", endpoint: '{endpoint}'"
    made = settings(
        LEAST.replace("us-east-1", f"us-east-1{there}") + f"instance: {{watch: {watch}}}\n"
    )
    aws = services.Aws(made)
    if expected is SettingsError:
        with pytest.raises(SettingsError, match=r"instance\.watch is on"):
            _ = aws.imds
    else:
        assert aws.imds == expected


def test_each_service_has_its_endpoint_or_that_of_all():
    text = LEAST.replace(
        "us-east-1",
        "us-east-1, endpoint: 'http://127.0.0.1:1', endpoints: {kinesis: 'http://127.0.0.1:2'}",
    )
    aws = services.Aws(settings(text))
    assert aws.kinesis.url.rstrip("/") == "http://127.0.0.1:2"
    assert aws.dynamodb.url.rstrip("/") == "http://127.0.0.1:1"
    assert aws.metrics is None
    made = settings(text + "observe: {cloudwatch: {namespace: n}}\n")
    assert services.Aws(made).metrics is not None
    assert aws.lifecycle is not None
    with pytest.raises(SettingsError, match="lives only while `kclrun run` does"):
        services.Aws(settings(LEAST.replace("region: us-east-1", "endpoint: embedded")))


def test_pauses_of_a_start_double_up_to_their_longest():
    slow, lost = Throttled("slow down"), Unavailable("no answer")
    throttled = [patience.WHILE_THROTTLED.pause_s(slow, n, 0.5) for n in (1, 2, 20)]
    away = [Retries().pause_s(lost, n, 0.5) for n in (1, 2, 20)]
    assert throttled == pytest.approx([0.375, 0.75, 15.0])
    assert away == pytest.approx([away[0], 2 * away[0], 2.25])


def opened_world(monkeypatch: pytest.MonkeyPatch, text: str, **aws: Any) -> tuple[Any, list[Any]]:
    """The world of these settings, and the calls of its start in their order."""
    calls: list[Any] = []
    summary = StreamSummary("orders", "arn", "ACTIVE", 24, 1, WallTime(5.0))
    made = settings(text)
    admin = SimpleNamespace(
        summary=lambda: summary, list_shards=lambda: calls.append("list"), name="admin"
    )
    fake = SimpleNamespace(
        settings=made,
        admin_of=lambda _: admin,
        reader_of=lambda _: None,
        imds=None,
        lifecycle="lifecycle",
        table="table",
        credentials="credentials",
        kinesis="kinesis",
        dynamodb="dynamodb",
        source="kinesis",
        source_client=SimpleNamespace(service_time="time"),
        kinesis_client=SimpleNamespace(close=lambda: calls.append("close")),
        metrics="metrics",
        story="story",
        coordinator="coordinator",
        control="control",
        stream=admin,
        called_table="the table",
        called_stream=lambda name: f"the stream {name}",
    )
    fake.__dict__.update(aws)

    def ensure(control: str, table: str, **more: Any) -> None:
        calls.append(("ensure", control, table, more["create"], round(more["timeout_s"])))
        more["wait"](0.25)

    monkeypatch.setattr(startup, "Aws", lambda _: fake)
    output = ("output.s3", lambda: calls.append("output"))
    monkeypatch.setattr(startup, "output_checks", lambda *_: [output])
    monkeypatch.setattr(startup, "time", Clock())
    monkeypatch.setattr(startup, "boottime", lambda: Clock().now)
    monkeypatch.setattr(startup, "ensure_table", ensure)
    monkeypatch.setattr(
        startup, "refuse_other_kind", lambda _, created: calls.append(("kind", dict(created)))
    )
    monkeypatch.setattr(
        startup, "active_consumer", lambda _, summary: calls.append("consumer") or "the consumer"
    )
    return startup.open_world(made), calls


def test_a_world_is_opened_after_its_checks(monkeypatch):
    opened, calls = opened_world(monkeypatch, LEAST)

    kind = ("kind", {"": 5.0})
    assert calls == [("ensure", "control", "orders", True, 60), "list", kind, "output"]
    [source] = opened.streams.values()
    assert (source.consumer_arn, opened.instance) == (None, None)
    assert opened.described_instant == Clock().now

    text = LEAST.replace("region", "start_timeout: 0.5s, region") + (
        "fetch: {mode: fan-out}\nleases: {create: off}\n"
    )
    opened, calls = opened_world(monkeypatch, text, imds="imds")
    assert calls[0] == ("ensure", "control", "orders", False, 1)
    assert calls[-2:] == ["output", "consumer"]
    [source] = opened.streams.values()
    assert source.consumer_arn == "the consumer"
    assert (opened.instance.metadata, opened.instance.lifecycle) == ("imds", "lifecycle")


def test_an_engine_without_leases_has_its_stream_described(monkeypatch):
    _, calls = opened_world(monkeypatch, LEAST)
    del calls[:]
    assert startup.require_stream(settings()).name == "orders"
    assert calls == ["list", "close"]


def test_a_service_that_is_away_until_the_deadline_is_reported_with_the_last_error(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(patience, "time", clock)
    monkeypatch.setattr(patience.random, "random", lambda: 0.5)
    attempts: list[float] = []

    def fail() -> None:
        attempts.append(clock.now)
        raise Throttled("slow") if len(attempts) == 1 else Unavailable("away", operation="Scan")

    with pytest.raises(Unavailable, match="AWS has not answered for 4 s"):
        startup.patiently(fail, Instant(clock.now + 4.0), 4.0, what="it")
    # The first is that of a throttle; then each is longer, and none goes beyond the deadline.
    assert clock.slept[0] == pytest.approx(0.375)
    assert clock.slept[1:] == sorted(clock.slept[1:])
    assert 1.0 < sum(clock.slept) < 4.0


# The program itself


def test_process_1_ends_at_a_stop_before_the_manager_has_its_handler(monkeypatch):
    handlers: list[tuple[int, Any]] = []
    monkeypatch.setattr(signal, "signal", lambda *pair: handlers.append(pair))
    for pid in (7, 1):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        cli._end_at_the_first_signal()
    [(number, handler)] = handlers
    assert number == signal.SIGTERM
    with pytest.raises(SystemExit) as ended:
        handler(signal.SIGTERM, None)
    assert ended.value.code == 143


def test_the_first_names_are_shown_and_the_others_counted():
    assert some_of([str(n) for n in range(8)]) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert some_of([str(n) for n in range(9)]).endswith("6, 7, … 9 in all")


@pytest.mark.parametrize(
    ("error", "verb", "lines"),
    [
        (AccessDenied("no\nAsk for it"), "run", ["Cannot start: no", "  Ask for it"]),
        (SettingsError("x"), "consumers", ["Cannot go on: x"]),
        (Throttled("x"), "put", ["Cannot put: x", "  The service asked us to slow down for too"]),
        (Throttled("x\ny"), "put", ["Cannot put: x", "  y", "  The service asked us to slow down"]),
    ],
)
def test_a_message_has_advice_unless_it_brings_its_own(error, verb, lines):
    reported = messages.for_a_person(error, verb).splitlines()
    assert len(reported) == len(lines)
    assert all(shown.startswith(line) for shown, line in zip(reported, lines, strict=True))


def test_the_command_for_leases_shows_no_secret():
    given = [
        "application=a b",
        "table=t",
        "stream=s",
        "aws.region=eu-west-1",
        "secret.stream=x",
        "x=table=y",
    ]
    assert messages.command_of("leases", Path("my app.yaml"), given) == (
        "kclrun leases --config 'my app.yaml' --set 'application=a b' --set table=t"
        " --set stream=s --set aws.region=eu-west-1"
    )


def test_interrupts_and_closed_pipes_are_no_bugs(monkeypatch):
    def ends_with(error: BaseException) -> int:
        def main(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(program, "main", main)
        monkeypatch.setattr(sys, "stdout", sys.stdout)
        monkeypatch.setattr(sys, "stderr", sys.stderr)
        return run_program(["version"])

    assert ends_with(KeyboardInterrupt()) == 130
    assert ends_with(click.Abort()) == 130
    # Of a pipe to another process: nobody has closed our output.
    assert ends_with(BrokenPipeError()) == 70
    monkeypatch.setattr(messages, "has_lost_reader", lambda *_: True)
    code, closed = ends_with(BrokenPipeError()), (sys.stdout, sys.stderr)
    monkeypatch.undo()
    assert (code, closed) == (0, (None, None))
    assert exit_codes.exit_code_of(KeyboardInterrupt()) == exit_codes.INTERRUPTED == 130


# local, iam, check


@pytest.mark.parametrize(
    ("text", "pair"),
    [("a", ("a", 1)), ("a:1", ("a", 1)), ("a:99999", ("a", 99999)), ("x" * 128, ("x" * 128, 1))],
)
def test_a_stream_to_make_has_a_name_and_shards(text, pair):
    if pair[1] <= local.SHARDS_MAX:
        assert local._stream(text) == pair


@over_rows(
    "text",
    ["", ":2", "a:0", "a:", "a:x", "a:\u0663", "a:-1", f"a:{local.SHARDS_MAX + 1}", "x" * 129],
)
def test_a_stream_that_cannot_be_made_is_refused(text):
    with pytest.raises(click.BadParameter, match="expected NAME or NAME:SHARDS"):
        local._stream(text)
    assert local._stream(f"a:{local.SHARDS_MAX}") == ("a", local.SHARDS_MAX)


STOPS = {"stop_signals": (signal.SIGTERM, signal.SIGINT)}


@pytest.mark.parametrize("given", ["a", "a:", ":b", ""])
def test_credentials_are_a_key_and_a_secret(given, monkeypatch):
    assert local._pair(None) is None
    assert local._pair("a:b:c") == ("a", "b:c")
    with pytest.raises(click.BadParameter, match="expected KEY:SECRET"):
        local._pair(given)
    seen: list[Any] = []
    monkeypatch.setattr("kclrun.local.server.run_local", lambda *a, **k: seen.append((a, k)) or 5)
    monkeypatch.setattr(local, "stop_signals", lambda: STOPS["stop_signals"])
    assert run_program(["local", "--port", "0", "--limits", "--credentials", "a:b"]) == 5
    given_on = {"limits": True, "credentials": ("a", "b"), "streams": NewStreams({})} | STOPS
    assert seen == [((0,), given_on | {"hosts": (), "serves_moto_api": False})]


def test_names_and_the_interface_of_moto_are_given_on(monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr("kclrun.local.server.run_local", lambda *_, **k: seen.append(k) or 5)
    assert run_program(["local", "--host", "0.0.0.0", "--host", "kinesis", "--moto-api"]) == 5
    assert (seen[0]["hosts"], seen[0]["serves_moto_api"]) == (("0.0.0.0", "kinesis"), True)


@over_rows("number", ["\u0661" * 12, "1" * 11, "1" * 13, "12345678901x", ""])
def test_an_account_has_twelve_digits(number):
    with pytest.raises(SettingsError, match="expected 12 digits"):
        iam._account(settings(), number)
    assert iam._account(settings(), "1" * 12) == "1" * 12


def test_only_kclruns_own_sink_on_spark_is_put_into():
    spark = LEAST.replace("processor: a:B", "pipeline: m:f\nengine: spark\nspark: {checkpoint: c}")
    for text in (LEAST + "output: {path: o}\n", spark, spark + "output: {path: o, format: json}\n"):
        assert iam._sink(settings(text), None) is None  # type: ignore[arg-type]


@pytest.mark.usefixtures("user_code_here")
def test_a_check_names_what_has_no_effect_with_the_engine(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        "kclrun.cli.run.spark.require_spark", lambda _: SimpleNamespace(version="4.1.0")
    )
    path = tmp_path / "app.yaml"
    spark, hello = "spark: {checkpoint: c}\n", "processor: kclrun.samples.hello:Hello\n"
    common = f"application: orders\nstream: orders\naws: {{region: us-east-1}}\n{hello}{spark}"
    for more, words in (
        ("engine: spark\n", None),
        ("engine: spark\nleases: {max: 7}\n", "no effect with engine: spark: leases"),
        ("engine: fleet\n", "no effect with engine: fleet: spark"),
    ):
        path.write_text(common + more)
        path.chmod(0o600)
        assert run_program(["check", "--config", str(path), "--no-environment"]) == 0
        said = [line for line in capsys.readouterr().out.splitlines() if "no effect" in line]
        assert said == ([words] if words else [])


def test_a_check_prints_the_schema_for_editors(capsys):
    assert run_program(["check", "--schema"]) == 0
    schema = capsys.readouterr().out
    assert '\n  "' in schema
    assert json.loads(schema)


def checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *more: str, **failing: Exception
) -> int:
    """`check` of a file with two streams, whose stages answer, or fail as given."""

    def stage(name: str) -> Callable[..., str]:
        def answer(*arguments: Any) -> str:
            error = failing.get(name) or failing.get(f"{name}_{arguments[-1]}")
            if error is not None:
                raise error
            return "fine"

        return answer

    for name in ("identity", "stream", "table", "user_code", "spark"):
        monkeypatch.setattr(check, f"_{name}", stage(name))
    monkeypatch.setattr("kclrun.cli.services.Aws", lambda settings: settings)
    monkeypatch.setattr("kclrun.cli.destination_checks.output_checks", lambda *_: [])
    (tmp_path / "app.yaml").write_text(
        LEAST.replace("stream: orders", "streams: [{name: one}, {name: two}]")
    )
    (tmp_path / "app.yaml").chmod(0o600)
    return run_program(["check", "--config", str(tmp_path / "app.yaml"), *more])


def test_every_stage_of_a_check_is_reported_and_the_first_failure_is_its_code(
    monkeypatch, tmp_path, capsys
):
    def stages(*more: str, **failing: Exception) -> tuple[int, list[str]]:
        code = checked(monkeypatch, tmp_path, *more, **failing)
        return code, [" ".join(line.split()[:2]) for line in capsys.readouterr().out.splitlines()]

    settings_, aws = ["settings ok", "user code"], ["aws ok"]
    streams, table = ["stream ok", "stream ok"], ["table ok"]
    assert stages() == (0, settings_ + aws + streams + table)
    assert stages("--no-environment") == (0, settings_)
    assert stages(identity=AccessDenied("no")) == (77, [*settings_, "aws --"])
    assert stages(user_code=SettingsError("no")) == (78, settings_)
    assert stages(stream_one=NotFound("no"), table=SettingsError("no")) == (
        66,
        [*settings_, *aws, "stream --", "stream ok", "table --"],
    )
    here = ("--set", "aws.endpoint=embedded", "--set", "aws.region=null")
    assert stages(*here) == (0, [*settings_, "aws ok"])
    assert stages(*here, user_code=SettingsError("no"))[0] == 78


# tail


def test_a_tail_prints_what_fits_its_options_and_no_more(capfdbinary, monkeypatch):
    def shown(key: str | None, most: int | None, *keys: str) -> tuple[bytes, bool]:
        view = tail._View(lambda shard, record: f"{shard} {record.partition_key}", key, most)
        view.show("s", [Record(b"x", each, "1", 1.0) for each in keys])
        return capfdbinary.readouterr().out, view.is_full

    with open(1, "wb", closefd=False) as out:
        monkeypatch.setattr(tail.sys, "stdout", SimpleNamespace(buffer=out))
        assert shown(None, None, "a", "b") == (b"s a\ns b\n", False)
        assert shown("b", None, "a", "b") == (b"s b\n", False)
        assert shown(None, 1, "a", "b") == (b"s a\n", True)
        assert shown("b", 2, "b", "a", "b", "b") == (b"s b\ns b\n", True)
        assert shown(None, 3, "a", "b") == (b"s a\ns b\n", False)
        many = [f"k{n}" for n in range(250)]
        assert shown(None, None, *many)[0].split(b"\n")[:-1] == [f"s {k}".encode() for k in many]
        monkeypatch.undo()


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_text_for_a_terminal_that_is_gone_is_dropped_and_changes_no_exit_code(monkeypatch, name):
    master, slave = os.openpty()
    terminal = os.fdopen(slave, "w")
    monkeypatch.setattr(sys, name, terminal)
    messages.echo("is read", err=name == "stderr")
    os.close(master)

    messages.echo("is not read", err=name == "stderr")
    messages.echo("nor is this", err=name == "stderr")

    assert getattr(sys, name) is None
    with contextlib.suppress(OSError):  # what it was given is still in its buffer
        terminal.close()


def test_a_disk_that_fails_under_the_output_is_an_error(monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(messages.click, "echo", fails)

    with pytest.raises(OSError, match="Input/output error"):
        messages.echo("lost")


def test_a_reader_that_has_gone_is_noticed_without_a_write(monkeypatch):
    mine, other = socket.socketpair()
    with mine, other:
        monkeypatch.setattr(tail.sys, "stdout", SimpleNamespace(fileno=mine.fileno))
        other.send(b"something to read")
        assert not messages.has_lost_reader(sys.stdout)
        other.close()
        lost = messages.has_lost_reader(sys.stdout)
        monkeypatch.undo()
    assert lost


def test_events_of_a_tail_are_reported_beside_its_records(capsys):
    taken: list[Any] = []
    view: Any = SimpleNamespace(show=lambda *shown: taken.append(shown))
    for event in (
        EveryShardBegan(),
        Arrived("s", ["record"]),  # type: ignore[list-item]
        Ended("s", ("t", "u")),
        Ended("s", ()),
        Trouble("away \x1b"),
    ):
        tail._take_in(event, view, "orders", follows=True)
    tail._take_in(Ended("s", ("t",)), view, "orders", follows=False)
    reported = capsys.readouterr()
    assert (reported.out, taken) == ("", [("s", ["record"])])
    assert reported.err.splitlines() == [
        "Tailing orders; Ctrl-C ends it",
        "s has ended; t, u follows",
        "s has ended; nothing follows",
        "away �",
        "s has ended; t came after it",
    ]


def test_the_first_signal_ends_a_tail_between_two_lines_and_the_second_at_once():
    former = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with tail._stop_signals() as is_stopped:
        assert not is_stopped()
        signal.raise_signal(signal.SIGTERM)
        assert is_stopped()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == former


def test_shards_are_listed_for_as_long_as_a_start_is_patient(monkeypatch):
    given: list[Any] = []

    def patiently(
        call: Callable[[], object], deadline: float, patience_s: float, *, what: str
    ) -> object:
        given.append((deadline, patience_s))
        return call()

    clock = Clock()
    stream = SimpleNamespace(list_shards=lambda which: given.append(which.kind) or ())
    monkeypatch.setattr(tail, "time", clock)
    monkeypatch.setattr(startup, "patiently", patiently)
    aws: Any = SimpleNamespace(
        settings=settings(), stream=stream, called_stream=lambda name: f"the stream {name}"
    )
    assert tail._starts(aws, GivenTime("LATEST", StartPosition(LATEST)), ()) == {}
    assert given == [(clock.now + 60.0, 60.0), "AT_LATEST"]


def test_a_tail_is_over_at_its_time_or_its_signal(monkeypatch):
    clock, starts, seen = Clock(), {"s": None}, []
    signals = iter(())

    def follow(_aws: object, _starts: object, view: Any, **more: Any) -> int:
        seen.append((more["said"], more["follows"], view._left, view._keys))
        first, clock.now = more["is_over"](), clock.now + 30.0
        second = more["is_over"]()
        signal.raise_signal(signal.SIGTERM)
        seen.append((first, second, more["is_over"]()))
        return 5

    monkeypatch.setattr(tail, "time", clock)
    monkeypatch.setattr("kclrun.cli.times.time", Clock())
    monkeypatch.setattr(tail, "_starts", lambda *_: next(signals, None) or starts)
    monkeypatch.setattr(tail, "_follow", follow)
    monkeypatch.setattr("kclrun.cli.services.Aws", lambda _: None)
    line = ["tail", "--stream", "orders", "--region", "eu-west-1"]

    assert run_program(line) == 5
    assert run_program([*line, "--timeout", "30s", "--limit", "7", "--key", "k"]) == 5
    starts["t"] = None
    assert run_program([*line, "--timeout", "31s", "--shard", "1", "--from", "10m"]) == 5
    assert seen == [
        ("orders: 1 shard from LATEST", True, None, ()),
        (False, False, True),
        ("orders: 1 shard from LATEST", True, 7, ("k",)),
        (False, True, True),
        ("orders: 2 shards from 2023-11-14T22:03:20.000Z", False, None, ()),
        (False, False, True),
    ]
    # A signal that comes before it reads.
    signals = (signal.raise_signal(signal.SIGTERM) for _ in range(1))
    assert (run_program(line), len(seen)) == (0, 6)


@pytest.mark.parametrize(
    ("is_terminal", "begin", "no_colour", "made"),
    [
        (True, "LATEST", False, (77, False, True)),
        (True, "TRIM_HORIZON", True, (77, True, False)),
        (False, "LATEST", False, (None, False, False)),
    ],
)
def test_lines_are_made_for_what_shows_them(monkeypatch, is_terminal, begin, no_colour, made):
    monkeypatch.setenv("COLUMNS", "77")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_colour:
        monkeypatch.setenv("NO_COLOR", "1")
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(tail, "for_people", lambda **more: seen.append(more))
    monkeypatch.setattr(tail.sys, "stdout", SimpleNamespace(isatty=lambda: is_terminal))
    tail._line_maker(begin, as_json=False)
    monkeypatch.undo()
    assert seen == [dict(zip(("columns_max", "with_date", "with_colours"), made, strict=True))]
    assert tail._line_maker(begin, as_json=True) is tail.json_line


@over_rows(
    ("text", "columns", "cut"),
    [
        ("abcd", 4, "abcd"),
        ("abcde", 4, "abc…"),
        ("日本", 4, "日本"),
        ("日本語", 5, "日本…"),
        ("ab  cd", 5, "ab…"),
    ],
)
def test_a_text_is_cut_to_its_columns(text, columns, cut):
    assert tail._cut(text, columns) == cut


def test_a_tail_goes_on_until_it_is_full_over_or_alone(monkeypatch):
    given: list[Any] = []
    lost = [False]

    class Readers:
        def __init__(self, *arguments: Any, **more: Any) -> None:
            given.append((arguments[0], more))

        def __enter__(self) -> Any:
            return SimpleNamespace(
                events=lambda: iter([None, EveryShardBegan(), None, EveryShardBegan()])
            )

        def __exit__(self, *_: object) -> None: ...

    took: list[object] = []
    monkeypatch.setattr("kclrun.reading.readers.StreamReaders", Readers)
    monkeypatch.setattr(tail, "has_lost_reader", lambda _: lost[0])
    monkeypatch.setattr(tail, "_take_in", lambda event, *_, **more: took.append((event, more)))
    aws: Any = SimpleNamespace(settings=settings(), reader=None, stream=None)

    def follow(*, full_after: int = 9, over_after: int = 9) -> int:
        took.clear()
        view: Any = SimpleNamespace()
        type_ = type("View", (), {"is_full": property(lambda _: len(took) >= full_after)})
        view = type_()
        return tail._follow(
            aws, {}, view, follows=True, said="s", is_over=lambda: len(took) >= over_after
        )

    assert (follow(), len(took)) == (0, 2)
    assert took[0] == (EveryShardBegan(), {"follows": True})
    assert (follow(full_after=1), len(took)) == (0, 1)
    assert (follow(over_after=1), len(took)) == (0, 1)
    assert given[0] == ({}, {"follows": True, "patience_s": 60.0, "may_be_listed": False})
    lost[0] = True
    with pytest.raises(BrokenPipeError):
        follow()
