"""The worker's side of the weight bridge: receive an update, stage it, apply it between two steps."""
