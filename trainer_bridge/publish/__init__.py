"""The publisher of weights: tensors to buckets, trainer ranks, the choice of a transport."""
