"""Converts the configuration or the positions of another consumer."""
