"""The writes of the lease table as DynamoDB expressions, rendered from `protocol/conditions.py`.

Writes that differ only by their values have the same texts, which are rendered once and kept.
`lease_table.py` sends them. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from kclrun.aws.rows import columns_of, is_empty, itself, number, text
from kclrun.errors import InvariantViolation
from kclrun.model.lease import LeaseKey
from kclrun.model.sequence import (
    AT_TIMESTAMP,
    LATEST,
    SENTINELS,
    SEQUENCE_DIGITS_MAX,
    SHARD_END,
    TRIM_HORIZON,
    ExtendedSequenceNumber,
)
from kclrun.protocol import conditions
from kclrun.protocol.writes import ParentCondition, RowChange

Values = dict[str, dict[str, Any]]
_Compute = Callable[[Any], dict[str, Any]]
_Test = Callable[[Any], bool]

# The condition of CreateLease, and of each child: they put whole rows.
CREATE: Final = "attribute_not_exists(leaseKey)"
_EXISTS: Final = "attribute_exists(leaseKey)"


class Expression(msgspec.Struct, frozen=True):
    """The texts of a write, and the functions that compute its values. `update` is "" if the write
    only deletes or checks."""

    condition: str
    update: str
    values: tuple[tuple[str, _Compute], ...]


class BoundWrite(msgspec.Struct, frozen=True):
    """An expression with its values, for one row."""

    expression: Expression
    key: LeaseKey
    values: Values


def bind(change: RowChange | ParentCondition) -> BoundWrite:
    """The expression and values of a change to one existing row, or of the check of a parent's row.

    Raises: InvariantViolation for CreateLease and CreateChildren (they put whole rows), and for a
    write that must never be sent (`conditions.Write.mistake`).
    """
    kept = _KEPT.get(type(change))
    if kept is None:
        raise InvariantViolation(f"no expression for {type(change).__name__}")
    write, tests, expressions = kept
    if write.mistake is not None:
        write.refuse_mistake(change)
    form = 0  # one bit for each test
    for test in tests:
        form = form << 1 | test(change)
    expression = expressions.get(form)
    if expression is None:
        expression = expressions[form] = rendered(write, change)
    values = {}
    for name, compute in expression.values:
        values[name] = compute(change)
    return BoundWrite(expression, change.key, values)


def _tests_of(write: conditions.Write) -> Iterator[_Test]:
    """The tests of a change. Its texts depend on their outcomes, and on nothing else."""
    for effect in write.effects:
        if isinstance(effect, conditions.When):
            yield effect.test
        elif effect.value.may_be_absent:
            yield _is_absent(effect.value)
    for one in write.conditions:
        if isinstance(one, conditions.Equals | conditions.AtLeast | conditions.Below):
            if one.value.may_be_absent:
                yield _is_absent(one.value)
            for column, part in columns_of(one.field):
                if column.absent is not None:
                    yield _is_as_absent(one.value, part, column.absent)


def _is_absent(value: conditions.Value) -> _Test:
    return lambda change: is_empty(value.of(change))


def _is_as_absent(value: conditions.Value, part: Callable[[Any], Any], absent: int) -> _Test:
    def test(change: Any) -> bool:
        whole = value.of(change)
        return whole is not None and bool(part(whole) == absent)

    return test


def rendered(write: conditions.Write, change: Any) -> Expression:
    """The expression of one change."""
    texts = Texts(change)
    condition = texts.condition(write.conditions)
    update = texts.update(write.effects_of(change))
    return Expression(condition, update, tuple(texts.values.items()))


class Texts:
    """Renders the conditions and effects of one change; `values` are the values that the texts
    name."""

    def __init__(self, change: Any) -> None:
        self.values: dict[str, _Compute] = {}
        self._change = change

    def condition(self, parts: Sequence[conditions.Condition]) -> str:
        """All conditions hold on a row that exists."""
        return " AND ".join((_EXISTS, *map(self._condition, parts)))

    def update(self, effects: Sequence[conditions.Effect]) -> str:
        """All effects. A field that loses its value loses all its attributes."""
        clauses: dict[str, list[str]] = {"SET": [], "REMOVE": [], "ADD": []}
        for effect in effects:
            columns = columns_of(effect.field)
            if is_empty(effect.value.of(self._change)) and columns[0][0].absent is None:
                clauses["REMOVE"] += [column.name for column, _ in columns]
                continue
            for (column, _), name in zip(columns, self._named(effect), strict=True):
                match effect:
                    case conditions.Set():
                        clauses["SET"].append(f"{column.name} = {name}")
                    case conditions.SetOnce():
                        kept = f"if_not_exists({column.name}, {name})"
                        clauses["SET"].append(f"{column.name} = {kept}")
                    case conditions.Add():
                        clauses["ADD"].append(f"{column.name} {name}")
        return " ".join(f"{verb} {', '.join(parts)}" for verb, parts in clauses.items() if parts)

    def _condition(self, one: conditions.Condition) -> str:
        match one:
            case conditions.Equals():
                return self._equals(one)
            case conditions.Differs(field=field):
                (name,) = self._named(one)
                return f"{columns_of(field)[0][0].name} <> {name}"
            case conditions.StartsWith(field=field):
                (name,) = self._named(one)
                return f"begins_with({columns_of(field)[0][0].name}, {name})"
            case conditions.AnyOf(parts=parts):
                return _either(
                    alternative for part in parts for alternative in self._alternatives(part)
                )
            case conditions.AllOf(parts=parts):
                return f"({' AND '.join(map(self._condition, parts))})"
            case conditions.AtLeast():
                return self._at_least(one)
            case conditions.Below():
                return self._below(one)

    def _alternatives(self, one: conditions.Condition) -> tuple[str, ...]:
        """One condition, or three for a field without a value: some clients write NULL, or an empty
        text."""
        if not isinstance(one, conditions.Equals) or one.value.of(self._change) is not None:
            return (self._condition(one),)
        ((column, _), *_) = columns_of(one.field)
        absent = f"attribute_not_exists({column.name})"
        if not column.may_be_null:
            return (absent,)
        self.values |= {":null": _constant(text("NULL")), ":empty": _constant(text(""))}
        is_null = f"attribute_type({column.name}, :null)"
        return (absent, is_null, f"{column.name} = :empty")

    def _equals(self, one: conditions.Equals) -> str:
        """An expected value that an absent attribute stands for is found in both forms."""
        given = one.value.of(self._change)
        if given is None:
            return _either(self._alternatives(one))
        tests = []
        for (column, part), name in zip(columns_of(one.field), self._named(one), strict=True):
            test = f"{column.name} = {name}"
            if column.absent is not None and part(given) == column.absent:
                test = _either((test, f"attribute_not_exists({column.name})"))
            tests.append(test)
        return " AND ".join(tests)

    def _named(self, one: conditions.Condition | conditions.Effect) -> tuple[str, ...]:
        """The names of a value; adds it to `values`."""
        assert not isinstance(one, conditions.AnyOf | conditions.AllOf)
        for (column, part), name in zip(columns_of(one.field), one.value.names, strict=True):
            self.values[name] = _computed(one.value.of, part, column.encode)
        return one.value.names

    # The late checkpoint is the only write whose condition compares positions by their order [P19].
    #
    # DynamoDB does not know this order: it compares text as text, and `size()` counts characters.
    # So sequence numbers are compared by their number of digits, then as text. Sentinels are
    # compared by name: the condition lists those above the position last seen. (Text order alone
    # would put TRIM_HORIZON above any short number, and SHARD_END below every long one.)
    # `:after` and `:afterThat` are the sentinels above the position, the lowest first. A missing
    # one is replaced by SHARD_END, which the write refuses anyway.

    def _at_least(self, one: conditions.AtLeast) -> str:
        last, last_sub = self._named(one)
        of = one.value.of
        self.values |= _SENTINEL_VALUES | {
            ":after": lambda change: text(_sentinels_above(of(change))[0].sequence_number),
            ":afterThat": lambda change: text(_sentinels_above(of(change))[1].sequence_number),
            ":lastDigits": lambda change: number(_digits_up_to(of(change))),
        }
        same = f"checkpoint = {last}"
        if of(self._change).sub_sequence_number == 0:
            del self.values[last_sub]
        else:
            same = f"({same} AND checkpointSubSequenceNumber >= {last_sub})"
        longer = "size(checkpoint) > :lastDigits"
        above = f"size(checkpoint) = :lastDigits AND checkpoint > {last}"
        return (
            f"(checkpoint IN (:after, :afterThat)"
            f" OR (NOT {_SENTINEL} AND ({longer} OR ({above}))) OR {same})"
        )

    def _below(self, one: conditions.Below) -> str:
        position, sub = self._named(one)
        of = one.value.of
        self.values[":digits"] = lambda change: number(len(of(change).sequence_number))
        below = (
            f"{_SENTINEL} OR size(checkpoint) < :digits"
            f" OR (size(checkpoint) = :digits AND checkpoint < {position})"
        )
        if of(self._change).sub_sequence_number == 0:
            return f"({below})"
        lower = f"checkpointSubSequenceNumber < {sub}"
        absent = "attribute_not_exists(checkpointSubSequenceNumber)"
        return f"({below} OR (checkpoint = {position} AND ({lower} OR {absent})))"


def _computed(of: Callable[[Any], Any], part: Callable[[Any], Any], encode: _Compute) -> _Compute:
    if part is itself and encode in {text, number}:  # in one call less: those of every renewal
        return (lambda change: {"S": of(change)}) if encode is text else _number_of(of)
    return lambda change: encode(part(of(change)))


def _number_of(of: Callable[[Any], Any]) -> _Compute:
    return lambda change: {"N": str(of(change))}


def _either(tests: Iterable[str]) -> str:
    """DynamoDB refuses redundant parentheses."""
    alternatives = tuple(tests)
    return alternatives[0] if len(alternatives) == 1 else f"({' OR '.join(alternatives)})"


def _constant(value: dict[str, Any]) -> _Compute:
    return lambda _: value


_SENTINEL: Final = "checkpoint IN (:atTimestamp, :trimHorizon, :latest)"
_SENTINEL_VALUES: Final = {
    ":atTimestamp": _constant(text(AT_TIMESTAMP.sequence_number)),
    ":trimHorizon": _constant(text(TRIM_HORIZON.sequence_number)),
    ":latest": _constant(text(LATEST.sequence_number)),
}


def _sentinels_above(
    last: ExtendedSequenceNumber,
) -> tuple[ExtendedSequenceNumber, ExtendedSequenceNumber]:
    """The next two sentinels; SHARD_END in place of a missing one."""
    names = [sentinel.sequence_number for sentinel in SENTINELS]
    start = names.index(last.sequence_number) + 1 if last.is_sentinel else len(names)
    above = (*SENTINELS[start:], SHARD_END, SHARD_END)
    return above[0], above[1]


def _digits_up_to(last: ExtendedSequenceNumber) -> int:
    """The most digits of a number that is not above `last` by its number of digits alone.

    Every number is above every sentinel except SHARD_END. No number is above SHARD_END.
    """
    if last.sequence_number == SHARD_END.sequence_number:
        return SEQUENCE_DIGITS_MAX
    return 0 if last.is_sentinel else len(last.sequence_number)


# Of each kind of write: the tests of its form, and the expressions rendered so far by their form.
_Kept = tuple[conditions.Write, tuple[_Test, ...], dict[int, Expression]]
_KEPT: Final[Mapping[type[Any], _Kept]] = {
    kind: (write, tuple(_tests_of(write)), {}) for kind, write in conditions.WRITES.items()
}
