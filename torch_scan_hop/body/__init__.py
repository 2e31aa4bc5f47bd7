"""The body graph: what it is traced with, what is said of its nodes, what is derived from it.

``step_examples``   fakes of a step's arguments, with sizes or with symbols for them
``node_kinds``      what is a copy, a view, a draw of random numbers
``meta_values``     what is recorded of a graph's values, kept right when a rewrite changes them
``cleanup``         rewrites that every later stage profits from; those with a file of their own are
                    ``strided`` (layouts), ``linalg_checks`` (errors as values), ``trim_scans``,
                    ``float_operands`` (floats that vary, as tensors)
``stop_gradient``   where gradients stop, as an operator that traces keep
``carries_in``      the carries into the steps, read off the stack of those out of them
``cache``           what is derived from a body, kept with it; ``any_size``: once for all sizes
"""
