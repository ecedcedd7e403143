"""Is it right? Laws that a program is held to, and the report of what they came to."""
