"""The watch over an instance within a run, in virtual time: who is asked what, and when."""

import signal

import pytest

from kclrun.config.schema import InstanceSettings
from kclrun.errors import AccessDenied, Throttled, Unavailable
from kclrun.manager.instance_watch import InstanceWatch
from kclrun.manager.world import ExitReason, InstanceServices
from kclrun.model.instance import InstanceIdentity, InstanceLook, TargetState
from tests.unit.manager.manager_rig import BEGAN, ManagerRig, Pool

AWAY = Unavailable("refused", operation="metadata")
TERM = signal.SIGTERM


class Machine:
    """Metadata and group in one. `failures` are raised by the next questions, by name."""

    def __init__(self, loop):
        self._loop = loop
        self.asked = []
        self.failures = {}
        self.shown = InstanceLook()

    def _ask(self, name):
        self.asked.append((name, round(self._loop.now() - BEGAN, 2)))
        waiting = self.failures.get(name)
        if waiting:
            raise waiting.pop(0)

    def identify(self):
        self._ask("identify")
        return InstanceIdentity("i-0123456789abcdef0", "eu-west-1", "eu-west-1a")

    def look(self):
        self._ask("look")
        return self.shown

    def heartbeat(self, action):
        self._ask(f"heartbeat {action.hook}")

    def complete(self, action):
        self._ask(f"complete {action.hook}")

    def times(self, name):
        return [at for asked, at in self.asked if asked == name]


@pytest.fixture
def rig(tmp_path):
    made = []

    def make(watch="auto", **failures):
        run = ManagerRig(tmp_path)
        made.append(run)
        machine = Machine(run.loop)
        machine.failures = failures
        settings = InstanceSettings(
            watch=watch, group="orders", launch_hook="ready", termination_hook="drained"
        )
        instance = InstanceWatch(
            InstanceServices(machine, machine),
            settings,
            manager=run.manager,
            loop=run.loop,
            pool=Pool(run.loop),
            log=run.log,
        )
        run.manager.stays = instance.stays
        instance.open()
        return run, machine

    yield make
    for run in made:
        run.close()


def end_machine_at(run, machine, seconds):
    ended = InstanceLook(target_state=TargetState.TERMINATED)
    run.at(seconds, lambda: setattr(machine, "shown", ended))


def test_metadata_is_looked_at_each_five_seconds_and_the_launch_hook_completed_when_ready(rig):
    run, machine = rig()
    run.signal_at(23.0, TERM)

    assert run.run() is ExitReason.DRAINED

    assert machine.times("look")[:5] == pytest.approx([0.0, 5.0, 10.0, 15.0, 20.0], abs=0.2)
    (completed,) = machine.times("complete ready")
    assert completed <= 1.1, "within half a second of being ready"


@pytest.mark.parametrize(("watch", "warnings"), [("auto", 0), (True, 1)])
def test_without_metadata_it_is_asked_for_ever_more_seldom_and_missed_only_where_it_must_be(
    rig, watch, warnings
):
    run, machine = rig(watch, identify=[AWAY] * 20)
    run.signal_at(200.0, TERM)

    run.run()

    assert machine.times("identify") == pytest.approx([0, 5, 15, 35, 75, 135, 195], abs=0.2)
    assert machine.times("look") == []
    assert len(run.lines("service_unreachable")) == warnings


def test_metadata_that_was_there_and_fails_is_an_outage_with_one_warning(rig):
    run, _ = rig(look=[AWAY] * 3)
    run.signal_at(40.0, TERM)

    run.run()

    (line,) = run.lines("service_unreachable")
    assert line["operation"] == "look at the instance metadata"
    assert run.lines("service_back")[0]["outage_s"] == pytest.approx(15.0, abs=0.1)


def test_a_machine_that_ends_is_drained_and_its_group_told_when_all_is_given_up(rig):
    run, machine = rig()
    end_machine_at(run, machine, 12.0)

    assert run.run() is ExitReason.DRAINED

    (completed,) = machine.times("complete drained")
    assert completed == pytest.approx(15.1, abs=0.4)
    assert run.seconds >= completed
    assert len(run.processes.reported("drain")) == 2


def test_a_group_that_throttles_is_an_outage_and_asked_again_until_it_takes_it(rig):
    busy = Throttled("Rate exceeded", operation="CompleteLifecycleAction", code="Throttling")
    run, machine = rig(**{"complete drained": [busy, busy]})
    end_machine_at(run, machine, 12.0)

    run.run()

    assert len(machine.times("complete drained")) == 3
    assert [line["operation"] for line in run.lines("service_unreachable")] == [
        "answer the autoscaling group"
    ]
    assert len(run.lines("service_back")) == 1


def test_a_group_that_refuses_is_an_answer_and_no_outage(rig):
    denied = AccessDenied("no", operation="CompleteLifecycleAction", code="AccessDenied")
    run, machine = rig(**{"complete drained": [denied]})
    end_machine_at(run, machine, 12.0)

    assert run.run() is ExitReason.DRAINED

    assert len(machine.times("complete drained")) == 1
    assert run.lines("service_unreachable") == []
    (line,) = run.lines("lifecycle_not_completed")
    assert "no" in line["error"]


@pytest.mark.parametrize("question", ["identify", "look", "complete ready"])
def test_an_error_that_nobody_expects_ends_the_run(rig, question):
    run, _ = rig(**{question: [ZeroDivisionError("our bug")]})

    with pytest.raises(ZeroDivisionError, match="our bug"):
        run.run()
