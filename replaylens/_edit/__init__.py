"""Graph -> Graph: interventions as data, edits as other graphs."""
