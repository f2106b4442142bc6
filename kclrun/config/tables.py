"""The settings that name a DynamoDB table, by its name or its ARN. Pure.

`rules.py` calls the rules. The region of the application is not always in the settings: where it
is found, `cli/services.py` looks once more.
"""

from __future__ import annotations

from collections.abc import Iterator

from kclrun.config.convert import Problem
from kclrun.config.outputs import named_outputs
from kclrun.config.schema import Settings, StartAtLeases
from kclrun.config.yaml_reader import Path
from kclrun.model.output import setting_of
from kclrun.model.table import may_be_same, of_another_region


def named_tables(settings: Settings) -> Iterator[tuple[Path, str]]:
    """Every setting that names a table, and the table; the lease table first."""
    yield ("leases", "table"), settings.table
    if isinstance(settings.start, StartAtLeases):
        yield ("start", "leases"), settings.start.leases
    if settings.state is not None and settings.state.table is not None:
        yield ("state", "store"), settings.state.table
    for name, output in named_outputs(settings):
        if output.dynamodb is not None:
            yield (*setting_of(name).split("."), "dynamodb"), output.dynamodb


def table_rules(settings: Settings) -> Iterator[Problem]:
    """Tables of another region, and tables that cannot be shared."""
    region = settings.aws.region
    for path, table in named_tables(settings):
        if region is not None and (wrong := of_another_region(table, region)) is not None:
            yield Problem(path, wrong)
    own = [(path, table) for path, table in named_tables(settings) if path != ("start", "leases")]
    for number, (path, table) in enumerate(own):
        for first, other in own[:number]:
            is_said = table == other and "dynamodb" in first  # by the rules of outputs
            if may_be_same(table, other) and not is_said:
                yield Problem(path, _shared(first))


def _shared(first: Path) -> str:
    if first == ("leases", "table"):
        return "expected a table of its own: workers scan the lease table"
    at = ".".join(map(str, first))
    return f"is the table of {at} already: expected a table of its own"
