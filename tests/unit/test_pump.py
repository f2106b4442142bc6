"""The order of events, commands and answers, as every shell of the cores drives them."""

import pytest

from kclrun.ports import Pump


class Shell:
    """A core that answers an event with the commands of `follow`; commands may do something."""

    def __init__(self, **follow):
        self.follow = follow
        self.does = {}
        self.done = []
        self.pump = Pump(self.handle, self.perform)

    def handle(self, event):
        self.done.append(event)
        return self.follow.get(event, ())

    def perform(self, command):
        self.done.append(command)
        self.does.get(command, lambda: None)()

    def hold(self):
        self.pump.is_held = True

    def post_and_run(self, event):
        self.pump.post(event)
        return self.pump.run()


def test_all_commands_of_an_event_are_performed_before_the_next_event():
    shell = Shell(e1=("c1", "c2"), e2=("c3",))
    shell.pump.post("e1")

    assert shell.post_and_run("e2")

    assert shell.done == ["e1", "c1", "c2", "e2", "c3"]


def test_a_core_sees_the_consequence_of_a_command_only_after_its_other_commands():
    shell = Shell(e1=("c1", "c2"))
    runs = []
    shell.does["c1"] = lambda: runs.append(shell.post_and_run("came of c1"))

    shell.post_and_run("e1")

    assert shell.done == ["e1", "c1", "c2", "came of c1"]
    assert runs == [False]


def test_the_answer_of_a_request_comes_before_the_events_that_happened_meanwhile():
    shell = Shell(e1=("request", "c2"))
    shell.does["request"] = shell.hold
    shell.post_and_run("e1")
    shell.post_and_run("e2")
    assert shell.done == ["e1", "request"]

    shell.pump.answer("answer")
    shell.pump.run()

    assert shell.done == ["e1", "request", "c2", "answer", "e2"]


def test_answers_of_two_requests_keep_their_order():
    shell = Shell(e1=("r1", "r2"))
    shell.does = {name: lambda name=name: shell.pump.answer(f"to {name}") for name in ("r1", "r2")}

    shell.post_and_run("e1")

    assert shell.done == ["e1", "r1", "r2", "to r1", "to r2"]


def test_nothing_is_handled_after_a_command_that_ends_the_run():
    shell = Shell(e1=("end", "c2"))
    shell.does["end"] = shell.hold
    shell.post_and_run("e1")
    shell.post_and_run("e2")

    assert shell.done == ["e1", "end"]


def test_a_command_that_raises_leaves_a_pump_that_runs():
    shell = Shell(e1=("c1",))

    def fail():
        raise KeyError("of the test")

    shell.does["c1"] = fail
    with pytest.raises(KeyError):
        shell.post_and_run("e1")

    assert shell.post_and_run("e2")
    assert shell.done == ["e1", "c1", "e2"]
