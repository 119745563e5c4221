"""Matrix products `x @ w.T` with few rows, for decode steps on a GPU. Their torch twin is `F.linear`.

    table          which kernel and which configuration a product takes
    triton_linear  the ops, and the kernel that reads tiles of weights
    triton_gemv    the kernel for one to four rows, which reads whole rows of weights
    gluon_linear   the kernel for Hopper, whose copy engine streams the weights

These modules need Triton.
"""
