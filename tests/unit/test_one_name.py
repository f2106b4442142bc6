"""A thing that the settings name has this name in Python too."""

import inspect

import msgspec
import pytest

import kclrun
from kclrun.config.schema import Settings
from kclrun.processor import Context
from kclrun.spark.processors.arguments import REPLACED
from kclrun.testing import run_processor
from tests.support.contexts import made_context
from tests.support.tables import over_rows

# Each name of Python, and its setting.
NAMES = {
    "Context.application": "application",
    "Context.stream": "stream",
    "Context.options": "options",
    "Context.uncheckpointed_max": "checkpoint.uncheckpointed_max",
    "Context.checkpoint_every": "checkpoint.every",
    "read(stream)": "stream",
    "read(start)": "start",
    "read(until)": "until",
    "read(decode)": "decode",
    "read(region)": "aws.region",
    "read(endpoint)": "aws.endpoint",
    "read(profile)": "aws.profile",
    "read(role_arn)": "aws.role_arn",
    "read(start_timeout)": "aws.start_timeout",
}


def has_setting(path):
    kind = Settings
    for name in path.split("."):
        fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
        if name not in fields:
            return False
        structs = [each for each in parts_of(fields[name]) if issubclass(each, msgspec.Struct)]
        kind = structs[0] if structs else type(None)
    return True


def parts_of(annotation):
    """The classes in a type: of `Annotated[X | None, …]` both."""
    if isinstance(annotation, type) and not hasattr(annotation, "__args__"):
        return [annotation]
    inner = getattr(annotation, "__args__", ())
    return [part for one in inner for part in parts_of(one)]


@over_rows(("name", "path"), NAMES.items())
def test_a_name_of_python_is_that_of_its_setting(name, path):
    last = path.rpartition(".")[2]
    owner, _, rest = name.replace("(", ".").rstrip(")").partition(".")
    if owner == "Context":
        assert isinstance(getattr(Context, rest), property)
    else:
        assert rest in inspect.signature(kclrun.read).parameters
    assert has_setting(path)
    assert rest in (last, path.replace(".", "_"))


@over_rows("path", REPLACED.values())
def test_a_keyword_of_spark_of_before_names_a_setting_that_is_there(path):
    assert has_setting(".".join(path))


@pytest.mark.filterwarnings("ignore:run_processor:DeprecationWarning")
@pytest.mark.parametrize(("every", "expected"), [("auto", 10.0), ("batch", "batch")])
def test_a_context_has_the_value_of_the_setting_and_warns_at_the_name_of_before(every, expected):
    found = []

    class Looking(kclrun.RecordProcessor):
        def initialize(self, context):
            found.append(context.checkpoint_every)
            with pytest.warns(DeprecationWarning, match=r"use context\.checkpoint_every.*2\.0"):
                found.append(context.checkpoint_mode)

        def process_records(self, batch, checkpointer):
            """Nothing."""

    run_processor(Looking, ["a"], checkpoint=every)
    assert found == [expected, every]


def test_a_deprecation_is_shown_at_the_line_that_uses_the_name():
    with pytest.warns(DeprecationWarning, match="checkpoint_mode is deprecated") as warned:
        made_context().checkpoint_mode  # noqa: B018 - the use is what warns
    assert warned[0].filename == __file__
