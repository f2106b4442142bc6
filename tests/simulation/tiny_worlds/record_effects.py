"""Records of a shard done out of order, with state: a model of where their effects are kept [K19].

The explicit states of one lease and its row: calls begin, return or raise; a commit puts a position
and the values of all keys on the row; a crash leaves the row alone. The value of a key is the tuple
of the records that it has seen. Rules are variants of the one that is built.
"""

from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

Value = tuple[int, ...]
WAITING, RUNNING, DONE = range(3)


class Rule(NamedTuple):
    """`in_place`: changes go to the one copy of the values when a call begins or returns, and a
    commit writes that copy. `undoes`: a call that raises takes its changes back. `in_key_order`: a
    record begins when the one before it of its key is done. `sees_done`: a record sees what done
    records of its key changed. `to_highest`: a commit goes to the highest record that is done, not
    to the last one below which all are."""

    in_place: Literal["", "begins", "returns"] = ""
    undoes: bool = True
    in_key_order: bool = True
    sees_done: bool = True
    to_highest: bool = False


class Tiny(NamedTuple):
    """`made` has what the call of each record made of its key's value, while it is not committed;
    `head` the copy of values in place; `row` the position and the values of the last commit."""

    of: tuple[int, ...]
    made: tuple[Value | None, ...]
    head: tuple[tuple[str, Value], ...]
    row: tuple[int, tuple[tuple[str, Value], ...]]
    raises: int
    crashes: int


class Found(NamedTuple):
    """`story` is empty if no move breaks the rule; else the shortest one that does."""

    states: int
    story: tuple[str, ...]


def explore(keys: str, rule: Rule, *, raises: int = 1, crashes: int = 1) -> Found:
    """Every order of moves of one record for each letter of `keys`, which is its key."""
    values = tuple((key, ()) for key in sorted(set(keys)))
    first = Tiny((WAITING,) * len(keys), (None,) * len(keys), values, (0, values), raises, crashes)
    known: dict[Tiny, tuple[Tiny, str] | None] = {first: None}
    waiting = deque([first])
    while waiting:
        now = waiting.popleft()
        for move, after in _moves(keys, rule, now):
            if after not in known:
                known[after] = (now, move)
                if after.row[1] != _fold(keys, after.row[0]):
                    return Found(len(known), _story(known, after))
                waiting.append(after)
    return Found(len(known), ())


def _fold(keys: str, upto: int) -> tuple[tuple[str, Value], ...]:
    seen = dict.fromkeys(keys, ())
    for number, key in enumerate(keys[:upto], 1):
        seen[key] = (*seen[key], number)
    return tuple(sorted(seen.items()))


def _moves(keys: str, rule: Rule, now: Tiny) -> Iterator[tuple[str, Tiny]]:
    for index, state in enumerate(now.of):
        if state == WAITING and _may_begin(keys, rule, now, index):
            value = (*_seen(keys, rule, now, index), index + 1)
            after = _with(now, index, RUNNING, value)
            if rule.in_place == "begins":
                after = after._replace(head=_put(after.head, keys[index], value))
            yield f"{index + 1} begins", after
        elif state == RUNNING:
            made = now.made[index]
            after = _with(now, index, DONE, made)
            if rule.in_place == "returns" and made is not None:
                after = after._replace(head=_put(after.head, keys[index], made))
            yield f"{index + 1} returns", after
            if now.raises:
                yield f"{index + 1} raises", _raised(keys, rule, now, index)
    yield from _commit(keys, rule, now)
    if now.crashes:
        at, values = now.row
        of = tuple(DONE if index < at else WAITING for index in range(len(keys)))
        made = (None,) * len(keys)
        yield "crash", Tiny(of, made, values, now.row, now.raises, now.crashes - 1)


def _may_begin(keys: str, rule: Rule, now: Tiny, index: int) -> bool:
    earlier = (now.of[each] for each in range(index) if keys[each] == keys[index])
    return not rule.in_key_order or all(state == DONE for state in earlier)


def _seen(keys: str, rule: Rule, now: Tiny, index: int) -> Value:
    key, half = keys[index], now.made[index]
    if rule.in_place:
        return dict(now.head)[key]
    if half is not None:
        return half
    done = [
        made
        for each, made in enumerate(now.made)
        if made is not None and keys[each] == key and now.of[each] == DONE
    ]
    return done[-1] if done and rule.sees_done else dict(now.row[1])[key]


def _raised(keys: str, rule: Rule, now: Tiny, index: int) -> Tiny:
    left = None if rule.undoes else now.made[index]
    after = _with(now, index, WAITING, left)._replace(raises=now.raises - 1)
    if rule.in_place == "begins" and rule.undoes:
        before = tuple(each for each in dict(now.head)[keys[index]] if each != index + 1)
        after = after._replace(head=_put(after.head, keys[index], before))
    return after


def _commit(keys: str, rule: Rule, now: Tiny) -> Iterator[tuple[str, Tiny]]:
    done = [index + 1 for index, state in enumerate(now.of) if state == DONE]
    upto = max(done, default=0)
    if not rule.to_highest:
        upto = next((index for index, state in enumerate(now.of) if state != DONE), len(keys))
    if upto <= now.row[0]:
        return
    values = now.head
    if not rule.in_place:
        values = now.row[1]
        for index in range(now.row[0], upto):
            made = now.made[index]
            if made is not None:
                values = _put(values, keys[index], made)
    made = tuple(None if index < upto else each for index, each in enumerate(now.made))
    yield f"commit at {upto}", now._replace(row=(upto, values), made=made)


def _with(now: Tiny, index: int, state: int, made: Value | None) -> Tiny:
    of, effects = list(now.of), list(now.made)
    of[index], effects[index] = state, made
    return now._replace(of=tuple(of), made=tuple(effects))


def _put(
    values: tuple[tuple[str, Value], ...], key: str, value: Value
) -> tuple[tuple[str, Value], ...]:
    return tuple(sorted({**dict(values), key: value}.items()))


def _story(known: dict[Tiny, tuple[Tiny, str] | None], at: Tiny) -> tuple[str, ...]:
    moves: list[str] = []
    while (before := known[at]) is not None:
        at, move = before
        moves.append(move)
    return tuple(reversed(moves))
