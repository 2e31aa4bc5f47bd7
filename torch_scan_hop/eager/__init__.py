"""Scans on real tensors, below autograd.

``run``         runs a scan: by a plan, also one for any size, in blocks, and the loop that is left
``loop``        that loop, and the tensors that it writes to
``writer``      its source: straight-line Python, which writes to preallocated tensors
``calls``       the function that the source calls for each operator, in place where it may
``nested``      writes short scans in a step out
``known_operands``  combines operands that are known before the loop
``few_steps``   runs a few small steps as they are written, under autograd
``fuse``        makes one call of some pairs of operators, and drops those that need no call
``plain_loop``  the Python loop of a body that cannot be traced, as fast as by hand
"""
