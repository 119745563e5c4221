"""The device: streams and events, memory that can be released, how much of it there is."""
