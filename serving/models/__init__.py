"""Loads, evicts, restarts and unloads models."""
