"""The code that both sides of a connection share: the codec, the messages, the manifest."""
