"""What `instance:` may say, and what it means."""

import pytest

from kclrun.cli.services import Aws
from kclrun.config.load import settings_of
from kclrun.config.rules import unused_settings
from kclrun.config.schema import InstanceSettings, Settings
from kclrun.errors import SettingsError
from kclrun.model.time import WallTime

NOW = WallTime(1_780_000_000.0)
HEAD = "{application: orders, stream: orders, processor: 'a:B', "


def settings(instance: str, more: str = "aws: {region: eu-west-1}") -> Settings:
    return settings_of(f"{HEAD}instance: {instance}, {more}}}", environment={}, now=NOW)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in ("AWS_EC2_METADATA_DISABLED", "AWS_EC2_METADATA_SERVICE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("instance", "drains"),
    [
        ("{}", False),
        ("{termination_hook: drained}", True),
        ("{termination_hook: drained, rebalance: ignore}", False),
        ("{rebalance: drain}", True),
    ],
)
def test_a_recommendation_drains_whoever_is_surely_replaced_or_asks_for_it(instance, drains):
    assert settings(instance).instance.drains_on_rebalance is drains


def test_one_hook_cannot_be_for_both_ends():
    with pytest.raises(SettingsError, match="a hook is for one of the two"):
        settings("{launch_hook: one, termination_hook: one}")
    settings("{launch_hook: one, termination_hook: other}")


@pytest.mark.parametrize("name", ["", "a hook", "x" * 256])
def test_a_hook_has_a_name_that_the_service_takes(name):
    with pytest.raises(SettingsError, match=r"instance\.launch_hook"):
        settings(f"{{launch_hook: '{name}'}}")


def test_spark_says_that_it_does_not_watch():
    spark = Settings(application="orders", instance=InstanceSettings(watch=True), engine="spark")

    assert unused_settings(spark) == ("instance",)


# Whether the metadata is asked at all.


def is_asked(instance: str, more: str = "aws: {region: eu-west-1}") -> bool:
    return Aws(settings(instance, more)).imds is not None


def test_it_is_asked_unless_it_is_switched_off(monkeypatch):
    assert is_asked("{}")
    assert not is_asked("{watch: off}")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert not is_asked("{}")


def test_an_application_on_an_aws_of_its_own_is_no_machine_of_a_group():
    emulator = "aws: {region: x, endpoint: 'http://127.0.0.1:4567'}"

    assert not is_asked("{}", emulator)
    assert is_asked("{watch: on}", emulator)


def test_what_must_be_watched_cannot_be_switched_off(monkeypatch):
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    with pytest.raises(SettingsError, match="AWS_EC2_METADATA_DISABLED"):
        is_asked("{watch: on}")
