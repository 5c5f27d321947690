"""Confines a model's own programs: Landlock, seccomp, capabilities, a user of their own."""
