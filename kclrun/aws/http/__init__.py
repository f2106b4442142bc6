"""HTTP/1.1 as this package speaks it: heads, one exchange, kept connections."""
