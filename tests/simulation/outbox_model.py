"""A model of the outbox: two owners of one lease, three outputs, every order of their steps [K12].

Each owner may stop at any step, come back as a zombie that knows nothing of the other, and have its
requests land at any later time, or never. The processor is not deterministic: which outputs get a
row of a record, and what the row says, differs from one execution to the next. A history is what
was decided of each record: who processed it, and which outputs it has rows for. A version is named
by the history that it holds.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

RECORDS = 2
OUTPUTS = (0, 1, 2)
# The outputs that one execution of a record may have rows for: none, the first, the others.
EMITS = ((), (0,), (1, 2))

Entry = tuple[int, tuple[int, ...]]  # the owner that processed the record, and its outputs
History = tuple[Entry, ...]


class Rules(NamedTuple):
    """What the product does; a test takes one away."""

    adopts_the_decided: bool = True
    fills_from_the_version: bool = True
    first_moves_always: bool = True
    first_decides: bool = True
    row_is_last: bool = True
    has_conditions: bool = True


class Request(NamedTuple):
    """A write under way: of output `to`, or of the row (-1), from one history to the next."""

    to: int
    owner: int
    began: History
    upto: History


class Owner(NamedTuple):
    """`at` is the state it goes on from, `upto` that of the commit under way. `steps` are the
    writes that the commit still needs, in order; `is_sent`: the first of them is under way."""

    number: int
    at: History
    upto: History
    steps: tuple[int, ...] = ()
    is_sent: bool = False
    has_begun: bool = False


class World(NamedTuple):
    row: History = ()
    counter: int = 0
    # Of each output: the history up to which it has its rows, and the rows.
    outputs: tuple[tuple[History, History], ...] = (((), ()),) * len(OUTPUTS)
    owners: tuple[Owner, ...] = ()
    under_way: frozenset[Request] = frozenset()


def rows_of(entries: History, output: int) -> History:
    return tuple(entry for entry in entries if output in entry[1])


class Model:
    def __init__(self, rules: Rules, owners: int = 2) -> None:
        self._rules = rules
        self._owners = owners
        order = OUTPUTS if rules.first_decides else (*OUTPUTS[1:], 0)
        self._steps = (*order, -1) if rules.row_is_last else (0, -1, *OUTPUTS[1:])

    def after(self, world: World) -> Iterator[tuple[str, World]]:
        """Every step that may come next. An owner that takes none has stopped."""
        if len(world.owners) < self._owners:
            yield "claims", self._claimed(world)
        for request in world.under_way:
            left = world._replace(under_way=world.under_way - {request})
            yield f"{request.to} takes that of {request.owner}", self._landed(left, request)
        for owner in world.owners:
            for words, moved in self._moves(world, owner):
                yield f"{owner.number} {words}", moved

    def _claimed(self, world: World) -> World:
        owner = Owner(world.counter + 1, world.row, world.row)
        return world._replace(counter=world.counter + 1, owners=(*world.owners, owner))

    def _landed(self, world: World, request: Request) -> World:
        if request.to < 0:
            is_ours = request.owner == world.counter and world.row == request.began
            return world._replace(row=request.upto) if is_ours else world
        at, rows = world.outputs[request.to]
        began = request.began
        if self._rules.has_conditions and at != began:
            return world
        rows += rows_of(request.upto[len(began) :], request.to)
        return _with_output(world, request.to, (request.upto, rows))

    def _moves(self, world: World, owner: Owner) -> Iterator[tuple[str, World]]:
        if not owner.has_begun:
            yield "begins", _with_owner(world, self._begun(world, owner))
        elif owner.steps:
            yield from self._commits(world, owner)
        elif len(owner.at) < RECORDS:
            for length in range(1, RECORDS + 1 - len(owner.at)):
                for emits in product(EMITS, repeat=length):
                    upto = (*owner.at, *((owner.number, each) for each in emits))
                    processed = owner._replace(upto=upto, steps=self._steps)
                    yield f"processes {emits}", _with_owner(world, processed)

    def _begun(self, world: World, owner: Owner) -> Owner:
        """The first output is read before the state: what it decided is the state."""
        decided = world.outputs[0][0]
        if not self._rules.adopts_the_decided or len(decided) <= len(owner.at):
            return owner._replace(has_begun=True)
        steps = OUTPUTS[1:] if self._rules.fills_from_the_version else ()
        return owner._replace(has_begun=True, at=owner.at, upto=decided, steps=(*steps, -1))

    def _commits(self, world: World, owner: Owner) -> Iterator[tuple[str, World]]:
        to = owner.steps[0]
        there = world.row if to < 0 else world.outputs[to][0]
        needs = to < 0 or (to == 0 and self._rules.first_moves_always)
        if not needs and not rows_of(owner.upto[len(owner.at) :], to):
            yield "skips", _with_owner(world, _next_step(owner))
        elif there == owner.upto or (to > 0 and len(there) > len(owner.at)):
            yield "goes on", _with_owner(world, _next_step(owner))
        elif not owner.is_sent:
            request = Request(to, owner.number, there if to > 0 else owner.at, owner.upto)
            sent = world._replace(under_way=world.under_way | {request})
            yield f"sends to {to}", _with_owner(sent, owner._replace(is_sent=True))
        elif to < 0 or there == owner.at:
            yield "sends again", _with_owner(world, owner._replace(is_sent=False))


def _next_step(owner: Owner) -> Owner:
    steps = owner.steps[1:]
    at = owner.at if steps else owner.upto
    return owner._replace(steps=steps, is_sent=False, at=at)


def _with_owner(world: World, owner: Owner) -> World:
    owners = tuple(owner if each.number == owner.number else each for each in world.owners)
    return world._replace(owners=owners)


def _with_output(world: World, output: int, value: tuple[History, History]) -> World:
    outputs = (*world.outputs[:output], value, *world.outputs[output + 1 :])
    return world._replace(outputs=outputs)


def wrong_with(world: World) -> str:
    """What is broken, in words; empty if nothing is."""
    decided = world.outputs[0][0]
    if world.row != decided[: len(world.row)]:
        return "the row has another execution than the first output"
    for output, (_, rows) in enumerate(world.outputs):
        expected = rows_of(decided, output)
        if rows != expected[: len(rows)]:
            return f"output {output} has another execution than the first one, or a row twice"
        if len(rows) < len(rows_of(world.row, output)):
            return f"output {output} lacks a row below the checkpoint"
    return ""


def explore(rules: Rules = Rules()) -> tuple[int, str, tuple[str, ...]]:
    """The number of states; and the first thing that breaks, with the steps that lead there."""
    model = Model(rules)
    first = World()
    came_from: dict[World, tuple[World, str] | None] = {first: None}
    layer = [first]
    while layer:
        following = []
        for world in layer:
            for words, after in model.after(world):
                if after in came_from:
                    continue
                came_from[after] = (world, words)
                if broken := wrong_with(after) or _wrong_at_the_end(rules, after):
                    return len(came_from), broken, _story(came_from, after)
                following.append(after)
        layer = following
    return len(came_from), "", ()


def _wrong_at_the_end(rules: Rules, world: World) -> str:
    """An owner without faults begins now, and comes to the end."""
    model = Model(rules, owners=len(world.owners) + 1)
    world = model._claimed(world._replace(under_way=frozenset()))
    while len(world.row) < RECORDS:
        last = world.owners[-1]
        moves = [moved for _, moved in model._moves(world, last)]
        if not moves:
            return "the next owner stands still"
        world = moves[-1]
        for request in world.under_way:
            world = model._landed(world, request)
        world = world._replace(under_way=frozenset())
    complete = all(
        rows == rows_of(world.row, output) for output, (_, rows) in enumerate(world.outputs)
    )
    return wrong_with(world) or ("" if complete else "an output lacks rows at the end")


def _story(came_from: dict[World, tuple[World, str] | None], world: World) -> tuple[str, ...]:
    story: list[str] = []
    while (step := came_from[world]) is not None:
        world, words = step
        story.append(words)
    return tuple(reversed(story))
