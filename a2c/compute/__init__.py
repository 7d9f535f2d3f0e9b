"""Where the arithmetic runs: devices, threads, copies of a network."""
