"""What the tests of bad input share: a program run to its end, and an endpoint that refuses."""
