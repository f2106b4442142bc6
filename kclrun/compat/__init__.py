"""Code that was written for another library, run by kclrun unchanged.

One folder for each library; `kclpy/` is for Amazon's `amazon_kclpy`. It knows the public interface
(`processor`), the configuration, the model and the errors, not leases, AWS or processes. Code here
translates and decides nothing. A feature without a counterpart is reported, not imitated.
"""
