"""Environments. Nothing here imports torch."""
