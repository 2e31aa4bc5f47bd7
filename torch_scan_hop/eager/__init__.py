"""Scans on real tensors, below autograd.

``run``         runs a scan: by a plan, in blocks, and the loop that the plan leaves
``loop``        that loop, and the tensors that it writes to
``writer``      its source: straight-line Python, which writes to preallocated tensors
``calls``       the function that the source calls for each operator
``nested``      writes short scans in a step out
``fuse``        makes one call of some pairs of operators, and drops those that need no call
``sized_plan``  a plan for any size, at the sizes of a call
``plain_loop``  the Python loop of a body that cannot be traced, as fast as by hand
"""
