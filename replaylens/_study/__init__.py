"""Experiments on programs, written with nothing but the public API."""

from .._store import results as results, runs as runs  # from here on files know whatever can be saved
