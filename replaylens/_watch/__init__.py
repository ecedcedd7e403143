"""Watching a training run from outside, and keeping the step that went wrong."""
