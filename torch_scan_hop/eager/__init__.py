"""Scans on real tensors, below autograd.

``run``         what the operator does: plan, blocks, and the loop that the plan leaves
``writer``      that loop as straight-line Python source, which writes to preallocated tensors
``fuse``        pairs of operators of a step that are one call
``sized_plan``  a plan for any size, at the sizes of a call
"""
