"""Helpers of the tests, in folders named after those of the tests that use them most."""
