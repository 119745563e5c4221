"""What a step computes beside its tokens where a request asks for it: likeliest tokens, log-probs of a prompt.

feature    what scores add to uploads and commits
taker      takes them from a step                      device
buffers    the kernels' side, and the copies to the host
"""
