"""Processors written for `amazon_kclpy` (its interfaces 1, 2 and 3), and its properties files.

In your tests, without the JVM and without `amazon_kclpy`:

    from kclrun.compat.kclpy import adapted, stand_in
    from kclrun.testing import run_processor

    stand_in()  # before the import of your processor
    from consumer import Consumer

    run = run_processor(adapted(Consumer), [b"one", b"two"], checkpoint="manual")
"""

from kclrun.compat.kclpy.adapter import adapted
from kclrun.compat.kclpy.standing_in import stand_in

__all__ = ["adapted", "stand_in"]
