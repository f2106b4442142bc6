"""Fixtures over the rig: an instance, its group, and an application that runs on it."""

import pytest

from tests.processes.instance_rig.group import GROUP, LAUNCH_HOOK, TERMINATION_HOOK, FakeGroup
from tests.processes.instance_rig.metadata import FakeMetadata

HOOKS = {"group": GROUP, "launch_hook": LAUNCH_HOOK, "termination_hook": TERMINATION_HOOK}


@pytest.fixture
def metadata():
    metadata = FakeMetadata()
    yield metadata
    metadata.close()


@pytest.fixture
def group(metadata):
    group = FakeGroup(metadata)
    yield group
    group.close()


@pytest.fixture
def on_instance(application, metadata, group):
    """Makes an application on that instance: `on_instance(stream, **settings)`."""

    def make(stream, /, **settings):
        aws = {"endpoints": {"autoscaling": group.url}}
        merged = {"aws": aws, "instance": HOOKS} | settings
        one = application(stream, **merged)
        one.more_environment = {
            "AWS_EC2_METADATA_DISABLED": "false",
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": metadata.url,
        }
        return one

    return make
