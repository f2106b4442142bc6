"""DynamoDB's condition and update expressions, as far as lease tables use them, compiled once.

A condition is `(item, values) -> bool`, an update changes `item`. As the service has it, values of
different types are unequal and in no order, and a comparison with an absent attribute is false.
"""

import functools
import operator
import re
from decimal import Decimal

_TOKEN = re.compile(r"\s*(<>|<=|>=|[=<>(),]|:?[A-Za-z_][A-Za-z0-9_]*)")
_COMPARE = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _number(value):
    return {"N": str(value)}


_FUNCTIONS = {
    "attribute_exists": lambda found: found is not None,
    "attribute_not_exists": lambda found: found is None,
    "attribute_type": lambda found, kind: found is not None and kind["S"] in found,
    "begins_with": lambda found, head: "S" in (found or {}) and found["S"].startswith(head["S"]),
    "size": lambda found: None if found is None else _number(len(next(iter(found.values())))),
}


def _plain(value):
    ((kind, content),) = value.items()
    return kind, Decimal(content) if kind == "N" else content


def _compared(symbol, left, right):
    if left is None or right is None:
        return symbol == "<>" and left is not right
    (left_kind, left), (right_kind, right) = _plain(left), _plain(right)
    if left_kind != right_kind:
        return symbol == "<>"
    return _COMPARE[symbol](left, right)


class _Parser:
    def __init__(self, text):
        self._tokens = _TOKEN.findall(text)
        assert "".join(self._tokens) == re.sub(r"\s+", "", text), f"not understood: {text}"
        self._at = 0

    def condition(self):
        found = self._either()
        assert self._peek() is None, f"more than a condition: {self._tokens}"
        return found

    def _peek(self):
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _next(self):
        self._at += 1
        return self._tokens[self._at - 1]

    def _accept(self, token):
        if self._peek() == token:
            self._at += 1
            return True
        return False

    def _expect(self, token):
        assert self._accept(token), f"expected {token} in {self._tokens}"

    def _either(self):
        parts = [self._both()]
        while self._accept("OR"):
            parts.append(self._both())
        return lambda item, values: any(part(item, values) for part in parts)

    def _both(self):
        parts = [self._one()]
        while self._accept("AND"):
            parts.append(self._one())
        return lambda item, values: all(part(item, values) for part in parts)

    def _one(self):
        if self._accept("NOT"):
            negated = self._one()
            return lambda item, values: not negated(item, values)
        if self._accept("("):
            inner = self._either()
            self._expect(")")
            return inner
        left = self._operand()
        if self._accept("IN"):
            choices = self._arguments()
            return lambda item, values: any(
                _compared("=", left(item, values), choice(item, values)) for choice in choices
            )
        if self._peek() in _COMPARE:
            symbol = self._next()
            right = self._operand()
            return lambda item, values: _compared(symbol, left(item, values), right(item, values))
        return left

    def _operand(self):
        word = self._next()
        if word in _FUNCTIONS:
            function, arguments = _FUNCTIONS[word], self._arguments()
            return lambda item, values: function(*(given(item, values) for given in arguments))
        if word.startswith(":"):
            return lambda _, values: values[word]
        return lambda item, _: item.get(word)

    def _arguments(self):
        self._expect("(")
        found = [self._operand()]
        while self._accept(","):
            found.append(self._operand())
        self._expect(")")
        return found


@functools.cache
def condition(text):
    return _Parser(text).condition()


# One change of an update: `name = value`, `name value` (ADD), or a name alone (REMOVE).
_CHANGE = re.compile(
    r"(?P<name>\w+)\s*(?:=\s*if_not_exists\((?P<kept>\w+), (?P<first>:\w+)\)|=?\s*(?P<value>:\w+))?"
)


@functools.cache
def update(text):
    """`(item, values)`; changes the item in place."""
    parts = re.split(r"\b(SET|REMOVE|ADD)\b", text)[1:]
    steps = []
    for verb, body in zip(parts[::2], parts[1::2], strict=True):
        for piece in re.split(r",\s*(?![^(]*\))", body.strip()):
            found = _CHANGE.fullmatch(piece.strip())
            assert found is not None, f"not understood: {piece} in {text}"
            steps.append((verb, found))

    def apply(item, values):
        for verb, found in steps:
            name = found["name"]
            if found["first"]:
                item[name] = item.get(found["kept"], values[found["first"]])
            elif verb == "SET":
                item[name] = values[found["value"]]
            elif verb == "ADD":
                before = Decimal(item.get(name, _number(0))["N"])
                item[name] = _number(before + Decimal(values[found["value"]]["N"]))
            else:
                item.pop(name, None)

    return apply
