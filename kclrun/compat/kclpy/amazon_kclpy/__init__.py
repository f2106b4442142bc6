"""Replaces the package `amazon_kclpy` where it is not installed.

It has the names that processors and their scripts import, in the same modules: `kcl`, `messages`,
`checkpoint_error`, `v2.processor`, `v3.processor`. No JVM, no daemon, no pipe: the lease process
calls the processor itself. `kclrun.compat.kclpy.stand_in` puts it in place.
"""
