"""The fixtures that pytest finds in an installation: `kclrun_aws`, `kclrun_stream`,
`run_application`.

For that, this file is installed a second time as `pytest_kclrun`, which imports nothing of kclrun:
pytest loads it for every project of an environment, also for those whose tests use none of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kclrun.local.in_process import InProcessAws
    from kclrun.pytest_plugin.applications import Applications
    from kclrun.pytest_plugin.streams import TestStream


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        'kclrun_stream(name="test", shards=1): the stream of the fixture `kclrun_stream`',
    )


@pytest.fixture(scope="session")
def _kclrun_services() -> Iterator[InProcessAws]:
    from kclrun.errors import SettingsError
    from kclrun.local.server import require_extra

    try:
        require_extra("a fixture of kclrun")
    except SettingsError as error:
        pytest.fail(str(error), pytrace=False)
    from kclrun.local.in_process import InProcessAws

    services = InProcessAws()
    yield services
    services.close()


@pytest.fixture
def kclrun_aws(_kclrun_services: InProcessAws) -> InProcessAws:
    """The embedded AWS, empty: `endpoint` for any SDK, `clock` to freeze and advance."""
    _kclrun_services.reset()
    return _kclrun_services


@pytest.fixture
def kclrun_stream(kclrun_aws: InProcessAws, request: pytest.FixtureRequest) -> TestStream:
    """A new stream, `test` with one shard, or with the arguments of the mark `kclrun_stream`."""
    from kclrun.pytest_plugin.streams import TestStream

    mark = request.node.get_closest_marker("kclrun_stream")
    return TestStream(kclrun_aws, *mark.args, **mark.kwargs) if mark else TestStream(kclrun_aws)


@pytest.fixture
def run_application(
    kclrun_aws: InProcessAws,
    kclrun_stream: TestStream,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Applications]:
    """Call it with settings to run an application over `kclrun_stream` until it has caught up."""
    from kclrun.pytest_plugin.applications import Applications

    folder = tmp_path_factory.mktemp("kclrun")
    with Applications(kclrun_aws, kclrun_stream.name, folder) as applications:
        yield applications
