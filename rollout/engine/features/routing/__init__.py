"""The experts that each token took, for requests that ask for them.

entries    the experts of tokens by page, and what one sequence has not sent      books on the host
record     the routers' choice in one step                                        device
feature    commits records, and adds experts to what is sent
"""
