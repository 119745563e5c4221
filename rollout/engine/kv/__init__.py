"""The places of KV: the pool of pages, the prefix cache, sessions, offload to the host."""
