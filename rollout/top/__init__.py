"""`rollout top`: workers seen live in a terminal, over the public protocol and nothing else."""
