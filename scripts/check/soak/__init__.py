"""The soak: mixed traffic with faults against supervised workers, every completion checked token by token."""
