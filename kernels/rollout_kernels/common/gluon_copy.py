"""Copies of Hopper's copy engine and a barrier, for kernels in Gluon. Triton renamed them after 3.6."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

#: A tile from memory to shared memory.
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
#: A tile from shared memory to memory.
store_tile = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
#: A barrier of all warps of a program.
meet = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
