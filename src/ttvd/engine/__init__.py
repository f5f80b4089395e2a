"""How the step of an adapter runs: eagerly, compiled, or recorded as a CUDA graph. Methods do not see it."""
