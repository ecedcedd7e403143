"""Pictures of a program: drawings, a page to explore, plots."""
