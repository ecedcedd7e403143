"""Model and inputs -> Graph, state and recorded values."""
