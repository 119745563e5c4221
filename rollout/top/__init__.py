"""`rollout top`: workers live in a terminal. It uses nothing but the public protocol."""
