"""The task definition for ECS: the service's model takes it, and its commands do what they say."""

import json
import shlex
import subprocess
import sys

import boto3
import pytest
from moto import mock_aws

from tests.deploy.facts import (
    DEPLOY,
    KILL_AFTER_S,
    NOT_RESTARTED,
    PROGRAM,
    STATE_DIR,
    USER,
    settings_by,
)
from tests.deploy.test_dockerfile import STAGES, of
from tests.patience import HUNG_S
from tests.support.http_service import HttpService
from tests.support.programs import run_to_end

TASK = json.loads((DEPLOY / "ecs-task.json").read_text())
[CONTAINER] = TASK["containerDefinitions"]
ZONE = "eu-west-1b"
# "Fargate: a value of 120 seconds at most."
STOP_MAX_S = 120


@pytest.fixture
def metadata():
    """A server that answers as the metadata of a task does, and as kclrun's health."""
    body = json.dumps({"AvailabilityZone": ZONE}).encode()

    with HttpService(lambda *_: (service.code, {}, body)) as service:
        service.code = 200
        yield service


def on_this_machine(text, tmp_path, python=sys.executable):
    """The command with this Python, and a kclrun that prints its arguments."""
    program = tmp_path / "kclrun"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o700)
    return text.replace("/opt/kclrun/bin/python", python).replace(PROGRAM[0], str(program))


def arguments(tmp_path, address, **environment):
    command = [
        *CONTAINER["entryPoint"],
        on_this_machine(*CONTAINER["command"], tmp_path, shlex.quote(sys.executable)),
    ]
    ran = run_to_end(
        command,
        env={"ECS_CONTAINER_METADATA_URI_V4": address, "PATH": "/usr/bin:/bin"} | environment,
    )
    assert ran.returncode == 0, ran.stderr
    return [PROGRAM[0], *ran.stdout.splitlines()]


def test_ecs_takes_it():
    with mock_aws():
        # botocore checks the names and types of all that is sent.
        made = boto3.client("ecs", "eu-west-1").register_task_definition(**TASK)

    assert made["taskDefinition"]["status"] == "ACTIVE"


def test_it_runs_kclrun_in_the_group_of_its_zone_and_has_time_to_drain(metadata, tmp_path):
    words = arguments(tmp_path, f"http://127.0.0.1:{metadata.port}/v4/x")
    found = settings_by(words)

    assert words[: len(PROGRAM)] == PROGRAM
    assert found.leases.group == ZONE
    assert found.shutdown.grace + KILL_AFTER_S <= CONTAINER["stopTimeout"] <= STOP_MAX_S


def test_a_stream_of_its_environment_is_read_in_place_of_those_of_the_file(tmp_path):
    [named] = CONTAINER["environment"]
    arn = "arn:aws:dynamodb:eu-west-1:111122223333:table/orders/stream/2026-01-01T00:00:00.000"
    found = settings_by(arguments(tmp_path, "http://127.0.0.1:9/v4", STREAM=arn))

    assert named == {"name": "STREAM", "value": ""}
    assert [each.name for each in found.sources] == [arn]


def test_without_an_answer_of_the_metadata_it_runs_in_no_group(tmp_path):
    assert settings_by(arguments(tmp_path, "http://127.0.0.1:9/v4")).leases.group == ""


def test_a_signal_reaches_kclrun_itself():
    """The shell has made room for it: nothing stands between ECS and process 1."""
    last = shlex.split(*CONTAINER["command"])
    assert last[last.index(PROGRAM[0]) - 1] == "exec"


@pytest.mark.parametrize(("code", "status"), [(200, 0), (503, 1)])
def test_its_health_is_that_of_kclrun(metadata, tmp_path, code, status):
    metadata.code = code
    kind, *command = CONTAINER["healthCheck"]["command"]
    found = settings_by(arguments(tmp_path, "http://127.0.0.1:9/v4"))
    here = [
        on_this_machine(each, tmp_path).replace(
            f"127.0.0.1:{found.observe.listen}/health", f"127.0.0.1:{metadata.port}/health"
        )
        for each in command
    ]

    ran = subprocess.run(here, capture_output=True, timeout=HUNG_S)

    assert kind == "CMD"
    assert str(metadata.port) in here[-1]
    assert ran.returncode == status


def test_a_container_is_as_the_image_says_and_writes_only_where_a_volume_is():
    mounts = {each["containerPath"] for each in CONTAINER["mountPoints"]}

    assert (CONTAINER["user"], CONTAINER["readonlyRootFilesystem"]) == (USER, True)
    assert CONTAINER["linuxParameters"] == {"capabilities": {"drop": ["ALL"]}}
    assert any(STATE_DIR.startswith(f"{mount}/") for mount in mounts)
    # On Fargate a volume belongs to root, but where the image says otherwise.
    assert [set(json.loads(each)) for each in of(STAGES[1], "VOLUME")] == [mounts]
    assert {each["sourceVolume"] for each in CONTAINER["mountPoints"]} == {
        each["name"] for each in TASK["volumes"]
    }


def test_it_is_started_again_as_by_systemd():
    assert set(CONTAINER["restartPolicy"]["ignoredExitCodes"]) == NOT_RESTARTED
