"""The device: streams and events, releasable memory, the size of the KV pool."""
