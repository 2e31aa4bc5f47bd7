"""Split one call into several scans, and choose the steps that the backward recomputes.

A strategy takes runs of one scan and gives a run of several (``run``); ``strategies`` chooses.

``unroll``      blocks of steps, then the steps that are left
``segments``    segments that are recomputed, each as a whole
``treeverse``   at most so many carries alive, for further recomputation
``stretches``   xs taken apart, ys put together
``policy``      what ``checkpoint=`` may be
"""
