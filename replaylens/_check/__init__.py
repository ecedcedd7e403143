"""The laws that a program must satisfy, and the report of checking them."""
