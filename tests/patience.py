"""How long a test waits for what must come: a limit says that something hangs, and nothing else."""

# What takes 2 s on a quiet machine takes 40 s at a load of 20 on two cores; seven times that is no
# load any more.
HUNG_S = 300.0
# A test may meet a few such waits, each well below; the mark `timeout` gives one more, never less.
TEST_S = 600.0
