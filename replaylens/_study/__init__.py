"""Experiments on programs, written with nothing but the public API."""
