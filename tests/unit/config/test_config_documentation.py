"""Every setting is documented, in the schema and in the file that people copy."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kclrun.config.convert import field_types, json_schema, members, plain_type
from kclrun.config.load import settings_of
from kclrun.config.schema import Settings
from kclrun.model.time import WallTime

APP_YAML = Path(__file__).parents[3] / "config" / "app.yaml"
NOW = WallTime(1_780_000_000.0)


def properties(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, reported in schema.get("properties", {}).items():
        yield f"{path}{name}", reported
        yield from properties(reported, f"{path}{name}.")
        yield from properties(reported.get("items", {}), f"{path}{name}[].")


def test_every_setting_has_a_description():
    undocumented = [
        path for path, reported in properties(json_schema()) if "description" not in reported
    ]

    assert len(list(properties(json_schema()))) > 50
    assert undocumented == []


def test_the_schema_has_every_setting_that_the_loader_takes():
    def names(struct: type[msgspec.Struct]) -> Iterator[str]:
        for name, annotation in field_types(struct).items():
            yield name
            for choice in members(annotation):
                bare = plain_type(choice)
                if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
                    yield from names(bare)

    in_schema = {path.rpartition(".")[2] for path, _ in properties(json_schema())}
    assert set(names(Settings)) <= in_schema


def test_the_schema_refuses_unknown_settings_and_asks_for_those_without_a_default():
    structs = {"": json_schema()} | {
        path: each
        for path, reported in properties(json_schema())
        for each in (reported, reported.get("items", {}))
        if "properties" in each
    }

    assert len(structs) > 15
    assert {path for path, each in structs.items() if each["additionalProperties"]} == set()
    assert {path: each["required"] for path, each in structs.items() if each["required"]} == {
        "": ["application"],
        "embedded.fill": ["source"],
        "embedded.reshard": ["after"],
        "streams": ["name"],
    }


def test_the_schema_shows_defaults_as_people_write_them():
    reported = dict(properties(json_schema()))

    assert reported["leases.failover"]["default"] == "10s"
    assert reported["fetch.buffer"]["default"] == "16MiB"
    assert reported["leases.max"] | {"description": ""} == {
        "type": "integer",
        "minimum": 1,
        "maximum": 1024,
        "default": 64,
        "description": "",
    }
    assert reported["processor"]["pattern"].startswith("^")
    shown = {path: each["default"] for path, each in reported.items() if "default" in each}
    assert shown.items() >= {
        *(("embedded.shards", 1), ("embedded.limits", False), ("embedded.fill.aggregate", 0.0)),
        *(("start", "TRIM_HORIZON"), ("instance.watch", "auto")),
    }
    assert (shown["output.partition_by"], shown["options"]) == ([], {})
    assert json.loads(json.dumps(shown)) == shown, "nothing but values of JSON"
    assert None not in shown.values()
    assert reported["aws.endpoints"]["propertyNames"] == {
        "enum": [
            *("kinesis", "dynamodb", "dynamodbstreams", "cloudwatch", "sts", "autoscaling"),
            *("s3", "sqs", "sns", "firehose", "glue"),
        ]
    }


def test_every_setting_appears_in_the_file_that_people_copy():
    text = APP_YAML.read_text()
    names = {path.rpartition(".")[2] for path, _ in properties(json_schema())}

    assert {name for name in names if not re.search(rf"\b{name}:", text)} == set()


def test_the_file_that_people_copy_loads():
    loaded = settings_of(APP_YAML.read_text(), environment={}, now=NOW)

    assert loaded.application == "orders"


def test_the_advanced_part_shows_the_true_defaults():
    """Uncommented, the advanced part must change nothing but what it shows as an example."""
    advanced = APP_YAML.read_text().split("# Advanced")[1].split("\n\n", 1)[1]
    uncommented = re.sub(r"^# ", "", advanced, flags=re.MULTILINE).split("embedded:")[0]
    loaded = settings_of(
        f"application: orders\nstream: orders\n{uncommented}", environment={}, now=NOW
    )

    assert loaded == Settings(application="orders", stream="orders")


def test_the_schema_says_what_the_values_of_a_mapping_are():
    reported = dict(properties(json_schema()))

    assert reported["aws.endpoints"]["additionalProperties"] == {"type": "string"}
    assert reported["options"]["additionalProperties"] is True, "a processor's own, of any kind"
