"""One Spark session and one embedded Kinesis for the whole folder; a new stream for each test."""

import os

import pytest

from kclrun.local.server import start_embedded
from kclrun.spark.engine.session import open_session
from tests.spark.source_rig import REGION, Collected, Stream, credentials_in


@pytest.fixture(scope="session", autouse=True)
def credentials(tmp_path_factory):
    """Workers inherit the environment of the JVM, which is that of whoever starts it first."""
    before = dict(os.environ)
    os.environ |= credentials_in(tmp_path_factory.mktemp("aws")) | {"AWS_REGION": REGION}
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def spark():
    """A session as users get it, on two cores. Never stop it: the folder shares it."""
    session = open_session(application="tests", master="local[2]")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def embedded():
    """The embedded AWS, without the service's rates."""
    with start_embedded() as running:
        yield running


@pytest.fixture
def stream(embedded):
    """A stream of one shard of its own."""
    return Stream(embedded.kinesis_endpoint, shards=1)


@pytest.fixture
def stream_of(embedded):
    """Makes a stream of as many shards as asked for."""
    return lambda shards: Stream(embedded.kinesis_endpoint, shards)


@pytest.fixture
def collected(spark, tmp_path):
    """Makes a `Collected` for a stream, with options of the source."""
    return lambda stream, **options: Collected(spark, stream, tmp_path, **options)


@pytest.fixture
def rig_of(request, spark, stream_of, tmp_path):
    """Makes a `Rig` of the test's module over a stream of as many shards as asked for."""
    made = []

    def make(shards):
        made.append(request.module.Rig(spark, stream_of(shards), tmp_path))
        return made[-1]

    yield make
    for query in (query for rig in made for query in rig.queries):
        query.stop()
