"""The kernel of a body of small matrices: each lane of the batch runs by itself.

A Kalman filter multiplies, solves and factors matrices of some rows for each element of a batch:
some ten operators a step, each of which costs a call and does next to nothing. Here a step is loops
over the entries of those matrices, whose sizes are constants, and a vector has an entry of several
lanes. (Very small ones are written out instead, entry by entry: ``inductor/scalars``.)

A body qualifies if it is pointwise on the CPU but for sums, products, factorisations and solves of
few entries in each lane, and if a lane reads no other lane of the carry.
"""

from __future__ import annotations

import sys
from typing import Any

import sympy
import torch
from torch import fx

from torch_scan_hop._torch.inductor_cpp import parallel_num_threads, vector_lanes
from torch_scan_hop._torch.inductor_values import NotPointwise
from torch_scan_hop._torch.sizes import are_known_equal, likely_value
from torch_scan_hop.body.meta_values import value_of
from torch_scan_hop.body.node_kinds import is_tensor_node
from torch_scan_hop.errors import Refusal
from torch_scan_hop.inductor.cpu.fits import check_tensors
from torch_scan_hop.inductor.cpu.matrix_body import MatrixBody
from torch_scan_hop.inductor.cpu.matrix_code import MatrixCode
from torch_scan_hop.inductor.cpu.matrix_lowering import BY_INDEX, PRODUCTS, REDUCTIONS
from torch_scan_hop.inductor.cpu.matrix_rules import FACTORISATIONS
from torch_scan_hop.inductor.decompositions import MATRICES
from torch_scan_hop.inductor.lane_body import READS_ELSEWHERE
from torch_scan_hop.inductor.node import ScanCall
from torch_scan_hop.inductor.qualify import CAT, check_pointwise_but_for
from torch_scan_hop.inductor.spans import WORK_FOR_THREADS, KernelInSpans, work_per_step
from torch_scan_hop.rewrites import current_options
from torch_scan_hop.rewrites.sizes import first_size

_OPERATORS = {*PRODUCTS, *REDUCTIONS, *FACTORISATIONS, *MATRICES, *BY_INDEX, CAT}

# Bytes of all values of a step, which lie on the stack.
SCRATCH_BYTES = 2**19


class MatricesKernel(KernelInSpans):
    kind = "one kernel, matrix by matrix"
    takes_small_matrices = True

    @staticmethod
    def check(body: fx.GraphModule) -> None:
        if not current_options().matrices:
            raise Refusal("matrices is switched off")
        if sys.platform == "win32":
            raise Refusal("not for compilers without vector types")
        # of a GPU's first: what comes next asks the compiler, which takes seconds
        values = map(value_of, body.graph.find_nodes(op="placeholder"))
        if any(isinstance(v, torch.Tensor) and v.device.type != "cpu" for v in values):
            raise Refusal("its tensors are not on the CPU")
        _check_that_threads_would_not_pay(body)
        check_pointwise_but_for(_OPERATORS, body)

    @classmethod
    def lower(cls, call: ScanCall) -> MatricesKernel:
        check_tensors(call.examples)
        lanes = _lanes(call)
        try:
            return cls(call, _step(call, lanes))
        except (Refusal, NotPointwise):
            if lanes is None:
                raise
        return cls(call, _step(call, None))

    def call_span(self, wrapper: Any) -> None:
        MatrixCode(self).emit(wrapper)


def _check_that_threads_would_not_pay(body: fx.GraphModule) -> None:
    """Refuse a step whose operators threads would share, if there are fewer vectors of lanes."""
    carry = next((value_of(n) for n in body.graph.nodes if is_tensor_node(n)), None)
    lanes = likely_value(carry.shape[0]) if carry is not None and carry.ndim else 1
    vectors = -(-lanes // (vector_lanes() or 1))
    if vectors < parallel_num_threads() and work_per_step(body) >= WORK_FOR_THREADS:
        raise Refusal(f"{lanes} lanes are too few for threads to share, and its steps are large")


def _step(call: ScanCall, lanes: Any) -> MatrixBody:
    width = 1 if lanes is None else _width(lanes)
    step = MatrixBody(call, lanes, width)
    across = step.read_across()
    if across and across <= set(step.inputs):
        shared = {step.inputs[name] for name in across}  # as many rows as there are lanes
        step = MatrixBody(call, lanes, width, shared)
        across = step.read_across()
    if across:
        raise Refusal(READS_ELSEWHERE)
    if step.nbytes > SCRATCH_BYTES:
        raise Refusal(f"its values take {step.nbytes:,} bytes, more than {SCRATCH_BYTES:,}")
    return step


def _lanes(call: ScanCall) -> Any:
    """Return the first size of all carries, if that may be a batch; None for one lane."""
    carry = call.examples.inputs.carry
    size = first_size(carry)
    if size is None or are_known_equal(size, 1):
        return None
    first = next(k for k, c in enumerate(carry) if c.ndim)
    return sympy.sympify(call.operands.carry[first].get_size()[0])  # or a number of Python's


def _width(lanes: Any) -> int:
    """Return how many lanes are in a vector."""
    most = vector_lanes() or 4
    if not lanes.is_Integer:
        return most
    width = 2
    while width < min(int(lanes), most):
        width *= 2
    return width
