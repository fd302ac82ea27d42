"""How to run: hardware, precision, compilation, CUDA graphs. Eager execution is the reference for all of them."""
