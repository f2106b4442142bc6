"""The registered consumer of an application: found or made at the start; listed and removed."""

import time
import uuid
from pathlib import Path

import pytest

from kclrun.aws.kinesis import create_stream
from kclrun.cli.consumers import active_consumer
from kclrun.cli.program import run_program
from kclrun.cli.services import Aws
from kclrun.cli.startup import patiently
from kclrun.config.load import settings_of
from kclrun.errors import SettingsError, Unavailable
from kclrun.local.filling import wait_until_active
from kclrun.local.server import start_embedded
from kclrun.model.quotas import CONSUMERS_DEFAULT
from kclrun.model.time import Instant, WallTime
from tests.patience import HUNG_S

pytestmark = pytest.mark.seconds
PROCESSOR = ["--set", "processor=kclrun.samples.hello:Hello"]


@pytest.fixture
def config(endpoint, tmp_path):
    """A configuration with a stream of its own, which is there."""
    file = tmp_path / "app.yaml"
    name = f"stream-{uuid.uuid4().hex[:12]}"
    file.write_text(
        f"application: shop\nstream: {name}\nfetch: {{mode: fan-out}}\n"
        f"aws: {{region: us-east-1, endpoint: '{endpoint}', start_timeout: 5s}}\n"
    )
    file.chmod(0o600)
    assert run_program(["put", "--create", "1", "--config", str(file), "/dev/null"]) == 0
    return file


def aws_of(config: Path, *overrides: str) -> Aws:
    now = WallTime(time.time())
    return Aws(settings_of(config.read_text(), list(overrides), environment={}, now=now))


def registered(aws: Aws, patience_s: float = HUNG_S) -> str:
    deadline = Instant(time.monotonic() + patience_s)
    return patiently(
        lambda: active_consumer(aws, aws.stream.summary()), deadline, patience_s, what="it"
    )


def names(aws: Aws) -> list[str]:
    return [each.name for each in aws.consumers_of(aws.stream.summary().arn).listed()]


def test_the_first_machine_registers_the_consumer_and_the_others_find_it(config):
    aws = aws_of(config)

    first = registered(aws)

    assert names(aws) == ["shop"]
    assert first.startswith(f"{aws.stream.summary().arn}/consumer/shop:")
    assert registered(aws_of(config)) == first


def test_a_consumer_may_be_named_and_given_by_its_arn(config):
    named = registered(aws_of(config, "fetch.consumer=another"))

    assert "/consumer/another:" in named
    assert registered(aws_of(config, f"fetch.consumer={named}")) == named


def test_the_arn_of_another_streams_consumer_is_refused(config):
    other = "arn:aws:kinesis:us-east-1:123456789012:stream/other/consumer/shop:1"

    with pytest.raises(SettingsError, match="is not a consumer of stream"):
        registered(aws_of(config, f"fetch.consumer={other}"))


def test_a_stream_that_can_have_no_more_consumers_ends_the_start_with_what_to_do(config, capsys):
    aws = aws_of(config)
    consumers = aws.consumers_of(aws.stream.summary().arn)
    for number in range(CONSUMERS_DEFAULT):
        consumers.register(f"c{number}")

    with pytest.raises(SettingsError) as refused:
        registered(aws)

    assert f"has {CONSUMERS_DEFAULT} registered consumers" in str(refused.value)
    assert "kclrun consumers remove NAME --yes" in str(refused.value)
    assert "fetch.mode: polling" in str(refused.value)
    assert run_program(["check", str(config), *PROCESSOR]) == 78
    assert f"has {CONSUMERS_DEFAULT} registered consumers" in capsys.readouterr().err


def test_a_check_says_whether_the_consumer_is_there_and_registers_none(config, capsys):
    run_program(["check", str(config), *PROCESSOR])
    assert "consumer shop is registered at the first start" in capsys.readouterr().out
    assert names(aws_of(config)) == []

    registered(aws_of(config))
    run_program(["check", str(config), *PROCESSOR])
    assert "consumer shop is ACTIVE" in capsys.readouterr().out


def test_consumers_are_listed_with_the_applications_own_marked(config, capsys):
    aws = aws_of(config)
    arn = registered(aws)
    aws.consumers_of(aws.stream.summary().arn).register("other")
    capsys.readouterr()

    assert run_program(["consumers", "list", str(config)]) == 0

    head, other, own = capsys.readouterr().out.splitlines()
    assert head == f"{aws.stream.summary().name}: 2 registered consumers"
    assert other.split()[:2] == ["other", "ACTIVE"]
    assert own.split()[:3] == ["shop", "ACTIVE", arn]
    assert own.endswith("(this application's)")


def test_a_consumer_is_removed_only_on_request_and_by_its_name(config, capsys):
    aws = aws_of(config)
    registered(aws)

    assert run_program(["consumers", "remove", "shop", str(config)]) == 0
    plan = capsys.readouterr().out
    assert plan.startswith("Would remove consumer shop")
    assert plan.endswith("Nothing was changed. To do it, add --yes\n")
    assert names(aws) == ["shop"]

    assert run_program(["consumers", "remove", "shop", str(config), "--yes"]) == 0
    assert "Removed consumer shop" in capsys.readouterr().out
    assert names(aws) == []

    assert run_program(["consumers", "remove", "shop", str(config), "--yes"]) == 66
    assert "no stream of this application has a consumer shop" in capsys.readouterr().err


def test_the_start_waits_until_the_consumer_is_active_or_its_time_is_over():
    with start_embedded(settle_s=0.5) as embedded:
        text = (
            "application: shop\nstream: slow\nfetch: {mode: fan-out}\n"
            f"aws: {{region: us-east-1, endpoint: '{embedded.endpoint}'}}\n"
        )
        aws = Aws(settings_of(text, [], environment={}, now=WallTime(time.time())))
        create_stream(aws.kinesis_client, "slow", 1)
        wait_until_active(aws.stream)

        with pytest.raises(Unavailable, match="consumer shop of stream slow is CREATING"):
            registered(aws, patience_s=0.0)

        arn = registered(aws)
        [consumer] = aws.consumers_of(aws.stream.summary().arn).listed()
        assert (consumer.arn, consumer.status) == (arn, "ACTIVE")
