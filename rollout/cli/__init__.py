"""The commands of `rollout`, one module each: `add_arguments` declares the arguments, `run` does the work.

Importing a command imports nothing heavy; torch, transformers, zmq and wandb come in with `run`.
"""
