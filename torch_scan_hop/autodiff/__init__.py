"""Reverse mode: a body is differentiated once into a forward and a backward body.

``differentiability``  finds the carries, xs, closures and ys that gradients flow through
``joint``              one graph of a step and its vector-Jacobian product
``cut``                decides what crosses from a step to its backward, before anything is built
``partition``          splits that graph along the cut; ``handover`` names what crosses
``derivative``         the bodies of a derivative; ``derive`` finds and keeps them
``function``           the autograd.Function that runs the two scans
"""
