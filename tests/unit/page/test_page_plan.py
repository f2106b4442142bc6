"""The settings as the page shows them: named ones only, and no secret."""

from kclrun.cli.page.command import letters_of, plan_of
from kclrun.config.load import settings_of
from kclrun.model.time import WallTime

TEXT = """
application: orders
streams:
  - {name: orders, options: {password: "${PASSWORD}"}, priority: 3}
  - {name: "arn:aws:kinesis:us-east-1:123456789012:stream/returns"}
options: {token: "${TOKEN}"}
processor: a:B
aws: {region: us-east-1, role_arn: "arn:aws:iam::123456789012:role/reader"}
leases: {failover: 20s, tags: {owner: hidden-3}}
on_error: {then: dead-letter, dead_letter: {sqs: orders-dead}}
output: {sql: "postgresql+psycopg://user@hidden-4/db", table: rows}
outputs: {late: {use: "own:Rows", options: {key: hidden-5}}}
"""


def test_the_plan_has_the_settings_and_of_options_only_the_names():
    secrets = {"PASSWORD": "hidden-1", "TOKEN": "hidden-2"}
    settings = settings_of(TEXT, environment=secrets, now=WallTime(1.0))

    plan = dict(plan_of(settings))
    text = str(plan) + letters_of(settings)

    assert "hidden" not in text
    assert dict(plan["leases"])["leases.failover"] == "20s"
    assert dict(plan["Stream orders"])["options (names only)"] == "password, token"
    assert dict(plan["Stream returns"])["options (names only)"] == "token"
    assert dict(plan["Output output"])["sql"] == "table rows; its address is not shown"
    own = {"use": "own:Rows", "options (names only)": "key", "format": "-"}
    assert dict(plan["Output late"]) == own
    assert letters_of(settings) == "Dead letters are kept in: queue orders-dead."


def test_an_application_that_halts_keeps_no_letters():
    text = "application: orders\nstream: orders\nprocessor: a:B\naws: {region: us-east-1}\n"

    assert letters_of(settings_of(text, environment={}, now=WallTime(1.0))) == ""


def test_a_stream_with_an_on_error_of_its_own_shows_what_counts_for_it():
    text = """\
application: shop
processor: a:B
aws: {region: us-east-1}
on_error: {retries: 9}
streams:
  - {name: orders}
  - {name: returns, on_error: {retries: 2}, concurrency: {records: 8}}
"""
    plan = dict(plan_of(settings_of(text, environment={}, now=WallTime(1.0))))
    orders, returns = dict(plan["Stream orders"]), dict(plan["Stream returns"])

    assert dict(plan["on_error"])["on_error.retries"] == "9"
    assert "on_error.retries" not in orders
    assert (returns["on_error.retries"], returns["on_error.then"]) == ("2", "halt")
    assert returns["concurrency.records"] == "8"
