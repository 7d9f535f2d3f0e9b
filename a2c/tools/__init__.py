"""What one does with trained runs: evaluate, record a video, compare, plot, report, watch."""
