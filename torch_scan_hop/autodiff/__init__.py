"""Reverse mode: a body is differentiated once into a forward and a backward body.

``differentiability``  which carries, xs, closures and ys gradients flow through
``joint``              one graph of a step and its vector-Jacobian product
``cut``                what crosses from a step to its backward, decided before anything is built
``partition``          that graph in two, along the cut; ``handover`` names what crosses
``derivative``         the bodies of a derivative, in three shapes; ``derive`` finds and keeps them
``function``           the autograd.Function that runs the two scans
"""
