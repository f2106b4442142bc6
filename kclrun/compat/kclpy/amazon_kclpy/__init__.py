"""What answers for the package `amazon_kclpy` where it is not installed.

The names that processors and their scripts import from it, in the modules they import them from:
`kcl`, `messages`, `checkpoint_error`, `v2.processor`, `v3.processor`. No JVM, no daemon, no pipe:
the lease process calls the processor itself. Put in place by `kclrun.compat.kclpy.stand_in`.
"""
