"""Tensor parallelism: the processes of one worker, a rank each, and what they tell one another."""
