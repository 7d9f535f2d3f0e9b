"""Operating-system processes: how they start, how they are watched, how they end. Nothing here imports torch."""
