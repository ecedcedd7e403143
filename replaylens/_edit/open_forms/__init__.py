"""Fused operations, written out in full."""
