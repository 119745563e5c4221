"""Helpers that several folders share.

device       what kernels ask about a GPU
gluon_copy   copies of the copy engine, under one name for every Triton
fp8          e4m3 codes and scales, in torch
triton_fp8   the same codes, inside kernels
triton_math  pieces of kernels: overlapping launches, matrix products, rounding
"""
