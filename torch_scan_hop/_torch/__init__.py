"""Every private torch API this project relies on, and nothing else.

Checked on torch 2.9.1, 2.13.0 and 2.15.0. One module per concern:

``operators``   higher-order operators, dispatch keys, the ``scan`` name
``tracing``     isolated FX traces on fake tensors, functionalized; ``isolation`` sets aside what is
                the caller's, ``fakes`` makes the tensors, ``sizes`` compares symbols
``transforms``  functorch interpreters, forward-mode AD levels
``dynamo``      variables, speculation, captures; ``dynamo.loading`` alone does not import Dynamo
``inductor``    IR nodes, lowerings, generated wrappers; ``inductor_values`` has values as functions
                of an index, ``inductor_cpp`` C++ kernels, ``inductor_passes`` graph passes

Modules outside this package import private torch names from here only, so that
a new torch release is a matter of one folder.
"""
