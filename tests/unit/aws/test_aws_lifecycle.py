"""The two calls that answer a lifecycle hook, against a group that waits at it."""

import pytest

from kclrun.aws.endpoints import EndpointSettings
from kclrun.aws.instance import BotoLifecycleActions
from kclrun.errors import (
    AccessDenied,
    InvalidRequest,
    NotFound,
    OutcomeUnknown,
    Throttled,
    Unavailable,
)
from kclrun.model.instance import LifecycleAction
from tests.processes.instance_rig.group import GROUP, LAUNCH_HOOK, TERMINATION_HOOK, FakeGroup
from tests.processes.instance_rig.metadata import INSTANCE_ID, FakeMetadata

LAUNCH = LifecycleAction("us-east-1", GROUP, LAUNCH_HOOK, INSTANCE_ID)
TERMINATION = LifecycleAction("us-east-1", GROUP, TERMINATION_HOOK, INSTANCE_ID)


@pytest.fixture
def group():
    metadata = FakeMetadata()
    group = FakeGroup(metadata)
    yield group
    group.close()
    metadata.close()


@pytest.fixture
def actions(group, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLEEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return BotoLifecycleActions(EndpointSettings(region="eu-west-1", endpoint_url=group.url))


def test_an_instance_is_put_into_service_and_let_go(group, actions):
    actions.complete(LAUNCH)
    assert group.state == "InService"

    group.end()
    actions.heartbeat(TERMINATION)
    actions.complete(TERMINATION)
    assert group.state == "Terminated"


@pytest.mark.parametrize(
    "action",
    [
        TERMINATION,
        LifecycleAction("us-east-1", "another", LAUNCH_HOOK, INSTANCE_ID),
        LifecycleAction("us-east-1", GROUP, "another", INSTANCE_ID),
        LifecycleAction("us-east-1", GROUP, LAUNCH_HOOK, "i-0fedcba9876543210"),
    ],
    ids=["no wait", "no group", "no hook", "another instance"],
)
def test_where_nothing_waits_nothing_is_found(group, actions, action):
    for call in (actions.heartbeat, actions.complete):
        with pytest.raises(NotFound):
            call(action)
    assert group.state == "Pending:Wait"


@pytest.mark.parametrize(
    ("failure", "leaf"),
    [
        ((400, "Throttling"), Throttled),
        ((403, "AccessDenied"), AccessDenied),
        ((500, "ResourceContention"), OutcomeUnknown),
        ((503, "ServiceUnavailable"), OutcomeUnknown),
        ((403, "ExpiredToken"), Unavailable),
        ((400, "ActiveInstanceRefreshNotFound"), InvalidRequest),
    ],
)
def test_each_failure_is_its_own_leaf_and_is_sent_once(group, actions, failure, leaf):
    group.failures.append(failure)

    with pytest.raises(leaf):
        actions.complete(LAUNCH)

    assert group.asked == ["CompleteLifecycleAction"]
    assert group.state == "Pending:Wait"


def test_keys_that_the_metadata_does_not_give_yet_are_asked_for_again(tmp_path, monkeypatch):
    """Without them nothing was sent: as when the service is away."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    with pytest.raises(Unavailable, match="no AWS credentials were found"):
        BotoLifecycleActions(EndpointSettings(region="eu-west-1")).complete(LAUNCH)


def test_an_answer_that_was_lost_is_an_unknown_outcome(group, actions):
    group.failures.append(None)

    with pytest.raises(OutcomeUnknown):
        actions.complete(LAUNCH)

    assert group.state == "InService"
    with pytest.raises(NotFound):
        actions.complete(LAUNCH)
