"""A process that has used up its descriptors: it keeps those that it has and gets no other."""

import contextlib
import resource


@contextlib.contextmanager
def no_more_descriptors():
    """Of the process of this test. What is imported for the first time inside cannot be."""
    former, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (former, hard))
