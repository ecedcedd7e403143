"""What a program is: pure data. No mode, no hook, no execution."""
