"""Speed: how to run, not what. Hardware, precision, compilation, CUDA graphs. Eager is the reference for all of them."""
