"""Scans on real tensors, below autograd.

``run``         what the operator does: plan, blocks, and the loop that the plan leaves
``loop``        that loop, and the tensors that it writes to
``writer``      its source: straight-line Python, which writes to preallocated tensors
``calls``       what that source calls for each operator
``nested``      short scans in a step, written out
``fuse``        pairs of operators of a step that are one call, and what needs no call
``sized_plan``  a plan for any size, at the sizes of a call
``plain_loop``  the Python loop of a body that cannot be traced, as fast as by hand
"""
