"""The table of operators: what each one is, where rewrites and kernels ask the same of many.

The answers stand above the operators that have them. An operator stands in one row, so to add one
is to find its row. The questions:

``batchable``      may be done for all steps at once (``rewrites/batchable`` says when)
``one_count``      its batching rule asks how many steps there are: what is traced for any trip
                   count would be for that one
``factorisation``  of a matrix, or a solve
``called``         is a call of several kernels in each step, also where a compiler has the loop
``contraction``    batching it over steps pays for the memory of its operands
``reduction``      keeps a body from being pointwise, and a loop from being one kernel
``sum``            of a tensor's elements; ``product``: its sum over steps is a product, too
``weighted``       multiplies rows by a weight, which kernels of rows do
``linear``         commutes with a sum over steps; so do a ``scaling`` by what is the same at every
                   step and, but for rounding, a ``cast``
``rearranging``    moves entries or leaves some out, or is the derivative of that: linear as well
``linear_in_first``  is so in its first argument, if all others are the same at every step
``apart``          is done to the real and the imaginary part apart
``contiguous``     makes a new contiguous result, whatever the strides of what it reads
``zeros``          makes zeros; ``by_index``: reads or writes at indices, of which a mask is one
``identity``       passes values on unchanged in a functional graph, and so gradients; a ``copy``,
                   values alone
``reshaping``      may turn out to change no shape
"""

from __future__ import annotations

import functools
import re
from typing import Any

import torch

aten = torch.ops.aten

_TABLE = """
# views
batchable: _reshape_alias.default split.Tensor split_with_sizes.default unbind.int
    unfold.default
batchable copy: detach.default
batchable linear apart: permute.default squeeze.dim squeeze.dims t.default transpose.int
    unsqueeze.default
batchable linear apart reshaping: reshape.default view.default
batchable apart reshaping: _unsafe_view.default
batchable linear apart reshaping: expand.default
batchable apart rearranging: diagonal.default select.int slice.Tensor
batchable apart: squeeze.default
rearranging: diag_embed.default diagonal_backward.default
batchable apart identity copy: alias.default
apart identity: lift_fresh_copy.default
# reductions, and sorts
batchable: all.default all.dim any.default any.dim argmax.default argmin.default cumprod.default
    logsumexp.default max.dim min.dim prod.default prod.dim_int var.correction
    var_mean.correction _softmax.default _log_softmax.default linalg_vector_norm.default
    cummax.default logcumsumexp.default sort.default topk.default
batchable linear_in_first: _softmax_backward_data.default _log_softmax_backward_data.default
batchable apart: cumsum.default
batchable reduction: amax.default amin.default
batchable reduction apart: mean.default mean.dim
batchable reduction sum apart: sum.default sum.dim_IntList
# products
batchable: dot.default
batchable contraction: baddbmm.default mv.default
batchable contraction weighted: addmm.default
batchable contraction product: bmm.default
batchable contraction product weighted contiguous: mm.default
batchable contraction one_count: convolution.default
contraction: addmv.default
# joins
batchable one_count: cat.default
batchable contiguous: stack.default
batchable apart rearranging: flip.default roll.default tril.default triu.default
batchable apart: constant_pad_nd.default repeat.default
# writes; a slice's gradient is one, into zeros
batchable one_count: scatter.src scatter.value scatter_add.default
batchable contiguous rearranging: select_backward.default
batchable contiguous one_count rearranging: slice_backward.default
# reads, and a norm
batchable one_count: embedding.default native_layer_norm.default
batchable one_count apart: gather.default index_select.default
apart by_index: index.Tensor
by_index: _unsafe_index.Tensor index_put.default _unsafe_index_put.default
# Factorisations whose result is unique: of an eigenvector or a singular vector, another algorithm,
# as GPUs have for many matrices at once, may give the negative one.
batchable factorisation: _linalg_det.default _linalg_slogdet.default linalg_cholesky_ex.default
    linalg_inv_ex.default linalg_lu_factor_ex.default linalg_solve_triangular.default
batchable factorisation linear_in_first: cholesky_solve.default
batchable factorisation one_count: _linalg_solve_ex.default linalg_lu_solve.default
batchable called: linalg_matrix_exp.default
# copies, and what makes a tensor
batchable linear apart copy: clone.default
batchable cast: _to_copy.default
cast: prims.convert_element_type.default
batchable: full_like.default new_full.default new_ones.default ones_like.default
    view_as_real.default view_as_complex.default
batchable zeros: new_zeros.default zeros_like.default
contiguous zeros: zeros.default
contiguous: full.default
# pointwise, with arguments of their own, or without torch's tag
batchable: _prelu_kernel.default _prelu_kernel_backward.default clamp.default clamp.Tensor
    clip.default clip.Tensor div.Scalar_mode div.Tensor_mode glu.default
    hardsigmoid_backward.default hardswish.default hardswish_backward.default
    hardtanh_backward.default log_sigmoid_backward.default log_sigmoid_forward.default
    round.decimals smooth_l1_loss_backward.default
batchable linear_in_first: elu_backward.default leaky_relu_backward.default
    softplus_backward.default
linear_in_first: sigmoid_backward.default tanh_backward.default threshold_backward.default
scaling: mul.Tensor mul.Scalar div.Tensor div.Scalar
scaling apart: neg.default
one_count linear_in_first: gelu_backward.default
"""


@functools.cache
def operators(question: str) -> frozenset[Any]:
    """
    >>> operators("contraction") > operators("product") == {aten.mm.default, aten.bmm.default}
    True
    """
    rows = re.findall(r"^(\w[\w ]*):((?: +\S+\n?)+)", _TABLE, re.MULTILINE)
    found = (row.split() for answers, row in rows if question in answers.split())
    return frozenset(_overload(name) for names in found for name in names)


def _overload(name: str) -> Any:
    *namespace, packet, overload = name.split(".")
    return getattr(getattr(torch.ops.prims if namespace else aten, packet), overload)
