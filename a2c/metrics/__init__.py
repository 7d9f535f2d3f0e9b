"""Measure, write, show and read back. Nothing here imports torch."""
