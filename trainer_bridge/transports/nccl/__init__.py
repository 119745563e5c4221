"""The transport `nccl`: buckets broadcast over a process group."""
