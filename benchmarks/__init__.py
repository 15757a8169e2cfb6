"""`cudnn_sdpa` against what else computes attention in PyTorch: ``python -m benchmarks``."""
