"""Activations of many layers over a whole dataset."""
