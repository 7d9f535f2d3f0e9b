"""Operating-system processes: start, watch, stop. Nothing here imports torch."""
