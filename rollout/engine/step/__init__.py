"""One step: pack it on the host, execute it on the device, read its outputs."""
