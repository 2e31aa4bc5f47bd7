"""Scan on XLA devices: the body becomes HLO, the scan one ``While`` around it.

``graph``    the body as a functional graph of ATen operators, traced on fakes
``program``  functions and loops lowered to HLO, and how to call them
``prepare``  prepares torch for tracing XLA tensors
``lower``    the XLA kernel of the operator: programs cached with their body, and called; of a body
             that torch_xla cannot lower, each step runs on its own

Only those steps run anything on the device, or send to it or read from it, before the caller's
graph is executed.
"""
