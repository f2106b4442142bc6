import pytest

from kclrun.config.load import load_settings, settings_of
from kclrun.config.schema import Settings
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime
from tests.support.tables import over_rows

NOW = WallTime(1_780_000_000.0)  # May 2026
LEAST = "application: orders\nstream: orders\n"


def settings(more: str = "", *overrides: str, **environment: str) -> Settings:
    return settings_of(LEAST + more, overrides, environment=environment, now=NOW, name="app.yaml")


def refusal(more: str = "", *overrides: str, **environment: str) -> str:
    with pytest.raises(SettingsError) as caught:
        settings(more, *overrides, **environment)
    return str(caught.value)


def test_two_lines_are_enough():
    loaded = settings()

    assert loaded == Settings(application="orders", stream="orders")
    assert loaded.table == "orders"


def test_durations_sizes_and_switches_arrive_as_numbers():
    loaded = settings(
        "stall: 1m30s\nfetch: {buffer: 1MiB}\nleases: {cleanup: off}\ncheckpoint: {every: batch}"
    )

    assert (loaded.stall, loaded.fetch.buffer, loaded.leases.cleanup) == (90.0, 2**20, False)
    assert loaded.checkpoint.every == "batch"


def test_a_checkpoint_may_be_a_duration():
    assert settings("checkpoint: {every: 500ms}").checkpoint.every == 0.5


def test_a_section_with_everything_commented_out_has_its_defaults():
    assert settings("leases:\n  # max: 3\n").leases.max == 64


@over_rows(
    ("more", "said"),
    [
        ("streem: x", "streem: no such setting; did you mean stream? (app.yaml line 3)"),
        ("leases:\n  maxx: 3", "leases.maxx: no such setting; did you mean max? (app.yaml line 4)"),
        ("aws: {endpoints: {kinesys: x}}", "aws.endpoints.kinesys: no such setting; did you mean"),
        (
            "leases: {max: many}",
            "leases.max: expected a whole number from 1 to 1024, got 'many' (app.yaml line 3)",
        ),
        ("leases: {max: 0}", "leases.max: expected a whole number from 1 to 1024, got 0 (app.yaml"),
        (
            "leases: {max: 'on'}",
            "leases.max: expected a whole number from 1 to 1024, got 'on' (app",
        ),
        ("leases: {cleanup: maybe}", "leases.cleanup: expected on or off, got 'maybe'"),
        ("stall: 10", "stall: expected a duration such as 10s, 250ms or 1m30s, got 10"),
        ("fetch: {buffer: lots}", "fetch.buffer: expected a size such as 16MiB or 512KiB"),
        ("checkpoint: {every: often}", "or batch or manual, got 'often'"),
        ("log: {level: loud}", "expected debug, info, warning or error, got 'loud'"),
        ("aws: {region: off}", "aws.region: expected a text, got a switch (on or off); put it in"),
        ("aws: {region: [1]}", "aws.region: expected a text, got a list (app.yaml line 3)"),
        (
            "aws: {region: }\nstall: ",
            "stall: expected a duration such as 10s, 250ms or 1m30s, got n",
        ),
        ("instance: {group: ''}", "instance.group: expected a text of 1 to 255 characters, got ''"),
        (f"stall: {'x' * 58}", f", got '{'x' * 58}' (app.yaml line 3)"),
        (f"stall: {'x' * 59}", f", got '{'x' * 59}… (app.yaml line 3)"),
        ("embedded: {shards: 501}", "embedded.shards: expected a whole number from 1 to 500, got"),
        ("leases: [1]", "leases: expected settings, got a list"),
        ("stall: {a: 1}", "stall: expected a duration such as 10s, 250ms or 1m30s, got a mapping"),
        ("options: [1]", "options: expected settings, one a line, got a list"),
        ("embedded: {reshard: 5}", "embedded.reshard: expected a list, got 5"),
        ("embedded: {reshard: {a: 1}}", "embedded.reshard: expected a list, got a mapping"),
        ("leases: {moves_per_cycle: 0}", "moves_per_cycle: expected a whole number of at least 1"),
        (
            "processor: processors/hello.py",
            "processor: expected a text like module:Class, or kclpy:script.py, got",
        ),
        ("processor: a.b:C.d", "processor: expected a text like module:Class"),
        ("embedded: {fill: {}}", "embedded.fill.source: is missing; a text like module:function"),
        ("leases: {group: 'a:b'}", "leases.group: expected a text without colons"),
        ("leases: {tags: {a: 1}}", "leases.tags.a: expected a text, got 1; put it in quotes"),
    ],
)
def test_what_is_wrong_is_reported_with_path_and_line(more, said):
    assert said in refusal(more)


def test_a_number_of_the_environment_is_read_as_long_as_a_line_shows_it():
    def least(digits: int) -> str:
        return "0b" + "1".zfill(digits - 2)

    assert settings("leases: {max: '${N}'}", N=least(60)).leases.max == 1
    assert "got what ${N} stands for" in refusal("leases: {max: '${N}'}", N=least(61))


@pytest.mark.parametrize(
    "more", ["fetch: {idle: 200ms}", "leases: {failover: 1s}", "leases: {failover: 15m}\nstall: 1h"]
)
def test_the_bounds_of_a_duration_belong_to_it(more):
    assert settings(more) != settings()


def test_everything_wrong_is_reported_at_once():
    reported = refusal("leases: {max: 0, hop: 1}\nstall: x").splitlines()

    assert [line.split(":")[0] for line in reported] == ["leases.hop", "leases.max", "stall"]


def test_values_out_of_bounds_are_reported_beside_those_of_a_wrong_type():
    with pytest.raises(SettingsError) as caught:
        settings_of(
            "stream: orders\nfetch: {idle: 50ms, batch_max: many}\nstart: yesterday\n"
            "observe: {listen: 99999}\naws: {endpoint: '10.0.0.1:1', region: [1]}\n"
            "leases: {failover: 2h, max: x}\nstall: soon\n"
            "streams: [{name: orders, start: tomorrow}]\n",
            environment={},
            now=NOW,
        )

    reported = {line.split(": ")[0] for line in str(caught.value).splitlines()}
    assert reported == {
        *("application", "fetch.idle", "fetch.batch_max", "start", "observe.listen"),
        *("aws.endpoint", "aws.region", "leases.failover", "leases.max", "stall"),
        "streams[0].start",
    }


def test_a_word_that_is_nearly_one_of_those_allowed_is_answered_with_it():
    assert "or error, got 'warn'; did you mean warning? (" in refusal("log: {level: warn}")
    assert "did you mean" not in refusal("log: {level: '${LEVEL}'}", LEVEL="warn")


@pytest.mark.parametrize(
    ("text", "switch"), [("off", False), ("On", True), ("false", False), ("TRUE", True)]
)
def test_a_switch_in_quotes_is_a_switch(text, switch):
    assert settings(f"instance: {{watch: '{text}'}}").instance.watch is switch
    assert settings(f"leases: {{cleanup: '{text}'}}").leases.cleanup is switch


def test_a_switch_is_a_text_where_a_text_is_wanted():
    assert settings("leases: {group: 'off'}").leases.group == "off"


@pytest.mark.parametrize("number", ["0x" + "f" * 6000, "9" * 5000, str(2**64), str(-(2**63) - 1)])
@pytest.mark.parametrize("place", ["stall", "options"])
def test_a_number_that_no_process_could_be_given_is_refused_in_words(number, place):
    more = f"stall: {number}" if place == "stall" else f"options: {{a: {number}}}"

    assert refusal(more) == (
        "app.yaml: line 3: a number of more than 64 bits; if it is an identifier, put it in quotes"
    )


def test_numbers_of_64_bits_are_numbers():
    loaded = settings(f"options: {{a: {2**64 - 1}, b: {-(2**63)}}}")

    assert loaded.options == {"a": 2**64 - 1, "b": -(2**63)}


def test_what_is_required_is_asked_for():
    with pytest.raises(SettingsError, match="stream: is missing; a text that is a stream's name"):
        settings_of("application: orders", environment={}, now=NOW)


@pytest.mark.parametrize("text", ["", "- a", "just words", "3"])
def test_a_file_that_holds_no_settings_says_so(text):
    with pytest.raises(SettingsError, match=r"expected settings|is missing"):
        settings_of(text, environment={}, now=NOW)


def test_a_number_and_a_switch_may_come_from_the_environment():
    loaded = settings("leases:\n  max: ${MAX:-8}\n  create: ${CREATE}\n", CREATE="off")

    assert (loaded.leases.max, loaded.leases.create) == (8, False)


def test_a_text_from_the_environment_stays_a_text():
    assert settings("leases: {table: '${TABLE}'}", TABLE="12345").leases.table == "12345"


def test_a_wrong_value_from_the_environment_is_not_shown():
    reported = refusal("leases:\n  max: ${SECRET}\n", SECRET="hunter2")

    assert "got what ${SECRET} stands for" in reported
    assert "hunter2" not in reported


def test_options_arrive_as_plain_values():
    loaded = settings("options: {window: '${W}', deep: [{a: 1}]}", W="15m")

    assert loaded.options == {"window": "15m", "deep": [{"a": 1}]}
    assert type(loaded.options["window"]) is str


def test_overrides_win_and_make_sections():
    loaded = settings("leases: {max: 3}", "leases.max=5", "fetch.idle=2s", "aws.region=eu-west-1")

    assert (loaded.leases.max, loaded.fetch.idle, loaded.aws.region) == (5, 2.0, "eu-west-1")


def test_an_override_saves_a_variable_that_is_not_set():
    assert settings("aws: {region: '${REGION}'}", "aws.region=us-east-1").aws.region == "us-east-1"


@over_rows(
    ("override", "said"),
    [
        ("leases.max", "expected a.b=value"),
        ("=3", "expected a.b=value"),
        ("a..b=3", "expected a.b=value"),
        ("stream.name=3", "--set stream.name: stream holds no settings of its own"),
        ("aws.region.a.b=3", "--set aws.region.a.b: aws.region holds no settings of its own"),
        ("leases.max=[", "--set leases.max: line 1: not readable"),
        ("leases.mox=3", "leases.mox: no such setting; did you mean max?"),
    ],
)
def test_a_wrong_override_is_reported(override, said):
    assert said in refusal("aws: {region: eu-west-1}", override)


def test_a_problem_of_an_override_is_not_given_a_line_of_the_file():
    assert "line" not in refusal("leases: {max: 3}", "leases.max=none")


def test_a_credential_is_refused_before_anything_else():
    assert "looks like a credential" in refusal(f"options: {{k: {'AKIA' + 'A' * 16}}}")


def test_a_file_is_loaded_with_its_name_in_messages(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("application: orders\nstream: orders\nstall: no\n")
    file.chmod(0o600)

    with pytest.raises(SettingsError, match=r"mine.yaml line 3"):
        load_settings(file, environment={}, now=NOW)
