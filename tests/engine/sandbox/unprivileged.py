"""Imported by a helper of sandboxes: it becomes a process that RLIMIT_NPROC holds for."""

from tests.processes import become_a_user

become_a_user(54322)
