"""Reverse mode: a body is differentiated once into a forward and a backward body.

``differentiability``  which carries, xs, closures and ys gradients flow through
``joint``              one graph of a step and its vector-Jacobian product
``partition``          that graph cut in two, with the values handed across chosen
``function``           the autograd.Function that runs the two scans
"""
