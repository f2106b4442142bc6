"""What the fixtures of the pytest plugin do: a stream of a test, and real runs of an application.

`registration` is the plugin itself. It knows the embedded AWS and the command line, not the cores.
"""
