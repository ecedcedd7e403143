"""The version of the package, which files name."""

__version__ = "0.1.0"
