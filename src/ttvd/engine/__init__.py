"""How a step runs: as written, as a CUDA graph, or compiled."""
