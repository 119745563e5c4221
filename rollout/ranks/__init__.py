"""Tensor parallelism: the processes of one worker, a rank each, and the orders and reports between them."""
