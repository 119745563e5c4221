"""A benchmark of agents that come back: trajectories of many turns, replayed against this service or a peer."""
