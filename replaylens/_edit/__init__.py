"""Graph -> Graph, and value -> value: interventions as data."""
