"""LoRA adapters that requests name.

adapter_table    which adapters lie in slots on the device               books on the host
memory           the slots, and the column of the row state              device
feature          what adapters add to admission and uploads; their changes between two steps
known_adapters   adapters by name, and what a sequence notes of its adapter
"""
