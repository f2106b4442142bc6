"""Applications written for `amazon_kclpy`, on a lease table as the Java KCL 2.x leaves it."""
