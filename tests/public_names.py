"""What of kclrun is public: the one list. The reference, the snapshot of signatures and the rules
about docstrings read it.

A module has a line here; its names are those of its `__all__`. A new public module needs a line,
and then `bin/docs` and `KCLRUN_SNAPSHOT=write` (see tests/architecture/test_public_names.py).
"""

import importlib

MODULES = {
    "kclrun": "What a processor needs, and a program that puts, reads or runs.",
    "kclrun.windows": "Windows of time over the records of each key, with timers and state.",
    "kclrun.testing": "The test kit: it runs a processor over records that a test makes.",
    "kclrun.spark": "What a Spark program needs.",
    "kclrun.compat.kclpy": "Processors written for `amazon_kclpy`, in your tests.",
    "kclrun.errors": "Every error that kclrun raises on purpose.",
}

# The fixtures that pytest finds where kclrun is installed. No program imports them, so they
# have no `__all__`: the functions with the decorator are the list.
FIXTURES = "kclrun.pytest_plugin.registration"

# The runtime makes these, or users subclass them: their constructors take what the runtime has, and
# are not public. Their names, methods and attributes are.
MADE_BY_THE_RUNTIME = {
    "kclrun.Checkpointer",
    "kclrun.Context",
    "kclrun.Counter",
    "kclrun.Delivery",
    "kclrun.KeyState",
    "kclrun.Output",
    "kclrun.OutputContext",
    "kclrun.Reading",
    "kclrun.RecordContext",
    "kclrun.RecordProcessor",
    "kclrun.RunResult",
    "kclrun.State",
    "kclrun.Table",
    "kclrun.testing.Run",
}

# Public classes have these for the runtime alone.
OF_THE_RUNTIME = {
    "kclrun.Delivery.call_back",
    "kclrun.Delivery.deadline",
}


def public_names(module):
    """The public names of a module, in order."""
    return sorted(importlib.import_module(module).__all__)
