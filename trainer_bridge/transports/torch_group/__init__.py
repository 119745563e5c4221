"""The transport `torch_group`: broadcasts in a process group that a trainer has made."""
