"""Updates of weights, as each server and trainer orders them: a module for each way, and its endpoints."""
