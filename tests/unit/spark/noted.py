"""DataFrames without a JVM: each notes what is asked of it."""


class Expression(str):
    """A column as a text."""

    def cast(self, _):
        return Expression(f"{self}:string")

    def alias(self, name):
        return Expression(f"{self} {name}")

    def __getitem__(self, name):
        return Expression(f"{self}.{name}")


class Functions:
    """`pyspark.sql.functions`: the result of each is a text."""

    def __getattr__(self, name):
        return lambda *given: Expression(f"{name}({', '.join(map(str, given))})")


class Frame:
    """A DataFrame, a reader or a writer: each call is a line of `calls`, and returns the frame."""

    def __init__(self, calls, **attributes):
        vars(self).update(calls=calls, **attributes)
        self.write = self.writeStream = self.readStream = self.dataSource = self

    def __getattr__(self, name):
        def note(*given, **named):
            self.calls.append(" ".join([name, *map(str, given), *map(str, named.items())]))
            return self

        return note
