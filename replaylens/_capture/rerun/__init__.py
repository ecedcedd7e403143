"""The model run again, with patches."""
