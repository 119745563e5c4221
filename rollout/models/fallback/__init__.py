"""Models without a native family: transformers' own modelling code over the paged KV cache.

model      `TransformersModel`: a module of transformers as the engine sees it; its `FallbackSpec`
build      from a config to a module without weights: what is refused, dtypes, the outline
ways       the ways of running a module over the pages; each start takes the first one that is right
rows       a step in pieces that a module takes under a cache of transformers
cache      that cache: its layers keep keys and values in the pages, and states in the state pool
attention  the attention function that all its layers call: this step's keys and values go to the paged cache
probe      forwards that show what each layer keeps and sees
masks      windows, read off the mask functions of transformers
experts    our kernels in transformers' interface for experts
weights    views of the parameters by the names of the checkpoint
start      the check at every start: the module over the paged cache against its own eager attention
host_reads which operations of a step wait for the device: such steps cannot be captured
tested     the architectures that the tests hold against transformers
"""
