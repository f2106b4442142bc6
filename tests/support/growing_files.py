"""Files to which other processes append lines."""


def lines_behind(path, offset):
    """The whole lines of a file behind an offset, and where they end."""
    with path.open("rb") as file:
        file.seek(offset)
        text = file.read()
    whole = text.rfind(b"\n") + 1
    return [line for line in text[:whole].split(b"\n") if line], offset + whole
