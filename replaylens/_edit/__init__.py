"""Interventions as data, and edits: Graph -> Graph."""
