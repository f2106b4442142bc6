"""Sessions of aircraft under fire: keyed state over a resharding stream."""
