"""A tokenizer that waits for the test."""

import threading

import numpy as np

from tests.support.patience import PATIENCE_S


class SlowCodec:
    """A tokenizer that waits for the test."""

    has_chat_template = False

    def __init__(self, codec) -> None:
        self.decode = codec.decode
        self.check_stop_strings = codec.check_stop_strings
        self.go = threading.Event()

    def encode(self, text):
        self.go.wait(PATIENCE_S)
        return np.array([1, 2], np.int32)
