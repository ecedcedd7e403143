"""The layers of a program as users see them: names, facts, tables."""
