"""A program as a file, and a file as a program. Reading one runs nothing that it names."""
