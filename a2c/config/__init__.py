"""Every setting of a run. Nothing here imports torch, numpy or gymnasium."""
