"""One step on the device: what is packed, what is run, what is read back."""
