"""Prints the records of a stream."""
