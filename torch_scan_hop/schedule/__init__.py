"""Split one call into several scans, and choose the steps that the backward recomputes.

A strategy builds a run of several scans from runs of one (``step.Run``); ``strategies`` chooses.

``unroll``      blocks of steps, then the steps that are left
``segments``    segments that are recomputed, each as a whole
``treeverse``   at most so many carries alive, for further recomputation
``stretches``   xs taken apart, ys put together
``policy``      checks ``checkpoint=``
"""
