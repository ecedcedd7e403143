"""Graph + state + known values -> Run."""
