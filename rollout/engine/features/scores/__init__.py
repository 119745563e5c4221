"""Scores that a step computes where a request asks for them: likeliest tokens, log-probs of a prompt.

feature    what scores add to uploads and commits
taker      takes them from a step                      device
buffers    the kernels' side, and the copies to the host
"""
