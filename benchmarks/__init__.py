"""``python -m benchmarks``: speed; ``python -m benchmarks.memory``: checkpoint policies."""
