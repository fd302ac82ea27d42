"""Execution: hardware, precision, compilation, CUDA graphs, distributed training. Eager execution is the reference."""
