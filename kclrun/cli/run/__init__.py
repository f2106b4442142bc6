"""Runs an application: on a fleet, on the embedded AWS, or on Spark."""
