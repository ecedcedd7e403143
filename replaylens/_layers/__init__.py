"""Graph + Run -> what a person wants to know about it."""
