"""Code that was written for another library, run by kclrun as it is.

One room a library; `kclpy/` is Amazon's `amazon_kclpy`. May know: the public interface
(`processor`), the configuration, the nouns and the errors. May not know: leases, AWS, processes.
Rule: a room here translates and decides nothing; what has no counterpart is said, not imitated.
"""
