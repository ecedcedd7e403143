"""Values -> findings. Nothing here knows more than a user can import."""
