"""The body graph: examples to trace it with, questions about its nodes, things derived from it.

``step_examples``   fakes of a step's arguments, with sizes or with symbols for them
``node_kinds``      is a node a copy, a view?
``meta_values``     the records of a graph's values, kept right when a rewrite changes them
``copies``          makes a changed graph of a body
``cleanup``         rewrites that every later stage profits from; those with a file of their own are
                    ``strided`` (layouts), ``linalg_checks`` (errors as values),
                    ``float_operands`` (floats that vary, as tensors)
``stop_gradient``   marks where gradients stop, by an operator that traces keep
``carries_in``      the carries into the steps, read from the stack of those out of them
``cache``           keeps what is derived from a body; ``any_size``: once for all sizes
"""
