"""The device: streams and events, releasable memory."""
