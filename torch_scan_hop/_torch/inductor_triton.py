"""Inductor's operators as lines of Triton, for kernels that are not Inductor's own (checked on
torch 2.9.1, 2.15.0; torch 2.13.0 without Triton).

Import it only once Inductor is needed: it takes seconds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import config
from torch._inductor.codegen.common import Kernel
from torch._inductor.codegen.triton import (
    TritonCSE,
    TritonCSEVariable,
    TritonKernelOverrides,
    texpr,
    triton_type,
)
from torch._inductor.utils import IndentedBuffer
from torch._inductor.virtualized import V
from torch.utils._sympy.value_ranges import ValueRanges

from torch_scan_hop._torch.inductor_values import NotPointwise, no_interpreter
from torch_scan_hop._torch.replaced import replaced

#: what the lines of a kernel refer to
HEADER = """\
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
"""


def compute_type(dtype: torch.dtype) -> str:
    """Return the type of values in registers: float32 for bfloat16 and float16.

    >>> compute_type(torch.bfloat16), compute_type(torch.bool)
    ('tl.float32', 'tl.int1')
    """
    return storage_type(computed_dtype(dtype))


def computed_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of values in registers."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def storage_type(dtype: torch.dtype) -> str:
    """Return the type of values in memory.

    >>> storage_type(torch.bfloat16)
    'tl.bfloat16'
    """
    return str(triton_type(dtype))


def index_text(expression: Any) -> str:
    """Return the code of an index whose symbols are variables of the kernel."""
    return str(texpr(expression))


class _Value(TritonCSEVariable):
    """A value whose masks are known to the lines that load and store."""

    def update_on_args(self, name: str, args: Any, kwargs: Any) -> None:
        pass


class _Operators(TritonKernelOverrides):
    """Replaces operators that ask a kernel of Inductor's about its loops; others are Inductor's."""

    @classmethod
    def constant(cls, value: Any, dtype: torch.dtype) -> str:
        shape = [1] * V.kernel.triton_tensor_ndim()
        text = str(cls._shaped_constant(value, dtype, shape))
        # torch 2.9 writes a float32 as a number of Python, which has no type to convert
        return text if text.startswith("tl.full") else f"tl.full({shape}, {text}, tl.float32)"

    @classmethod
    def index_expr(cls, expr: Any, dtype: torch.dtype) -> Any:
        return V.kernel.index_value(expr, dtype)

    @classmethod
    def value_expr(cls, expr: Any, dtype: torch.dtype) -> Any:
        return V.kernel.index_value(expr, dtype)

    @staticmethod
    def masked(mask: Any, body: Callable[[], Any], other: Any) -> Any:
        with V.kernel.masked_by(mask) as both:
            result = body()
        result = getattr(result, "value", result)
        return V.ops.where(both, result, V.ops.constant(other, result.dtype))

    @staticmethod
    def indirect_indexing(*_: Any, **__: Any) -> Any:
        raise NotPointwise("an index that is computed within a step")


class TritonLines(Kernel[TritonCSEVariable]):
    """Lines that compute values of one block of lanes; used as a context.

    ``load(name, index, mask)`` gives the code of a load, and the type of what is loaded;
    ``rename(expression)`` an index in terms of the kernel's variables. Lines are kept apart:
    those from before :meth:`begin_step`, and loads that are the same at every step, are not for
    the loop.
    """

    overrides = _Operators  # type: ignore[assignment]

    def __init__(
        self,
        shape: Sequence[str],
        load: Callable[[str, Any, str | None], tuple[str, torch.dtype]],
        rename: Callable[[Any], Any],
        is_invariant: Callable[[Any], bool],
    ) -> None:
        super().__init__(increase_kernel_count=False)
        self.cse = TritonCSE(self.newvar_prefix, self.suffix)
        self.shape = tuple(shape)
        self._before = self.compute
        self._load_code = load
        self._rename = rename
        self._is_invariant = is_invariant

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Let operators become lines, and let Inductor take the device for a GPU."""
        gpu = V.graph.set_current_device(torch.device("cuda", 0))
        with no_interpreter(), gpu, config.patch({"triton.codegen_upcast_to_fp32": True}), self:
            yield

    def begin_step(self) -> None:
        self.compute = IndentedBuffer()

    def write(self, lines: Sequence[str]) -> None:
        """Add lines of the step after those that are there."""
        self.compute.writelines(lines)

    def before_steps(self) -> list[str]:
        return str(self._before.getvalue()).splitlines()

    def of_a_step(self) -> list[str]:
        return str(self.compute.getvalue()).splitlines()

    def variable(self, name: str, dtype: torch.dtype) -> Any:
        """Return the value that the kernel has under that name."""
        computed = computed_dtype(dtype)
        value = _Value(name, ValueRanges.unknown(), computed, self.shape)
        self.cse.varname_map[name] = value
        return value

    def line(self, code: str, dtype: torch.dtype, before_steps: bool = False) -> Any:
        """Return the value of ``code``, which is computed once."""
        buffer = self._before if before_steps else self.compute
        return self.cse.generate(buffer, code, dtype=dtype, shape=self.shape)

    # --- asked by Inductor's operators ---

    def create_cse_var(self, *args: Any, **kwargs: Any) -> Any:
        return _Value(*args, **kwargs)

    def triton_tensor_ndim(self) -> int:
        return len(self.shape)

    def remove_kernel_local_buffers(self) -> None:
        """Remove nothing: the lines store nothing, and what is stored is the caller's."""

    def load(self, name: str, index: Any) -> Any:
        mask = None if self._load_mask is None else str(self._load_mask)
        code, dtype = self._load_code(name, index, mask)
        computed = computed_dtype(dtype)
        if dtype is torch.bool or computed is not dtype:
            code += f".to({compute_type(dtype)})"
        moves = mask is None and self._is_invariant(index)
        buffer = self._before if moves else self.compute
        return self.cse.generate(buffer, code, dtype=computed, shape=self.shape)

    def index_value(self, expression: Any, dtype: torch.dtype) -> Any:
        text, shape = index_text(self._rename(expression)), ", ".join(self.shape)
        code = f"(tl.full([{shape}], 0, tl.int64) + ({text})).to({compute_type(dtype)})"
        computed = computed_dtype(dtype)
        return self.cse.generate(self.compute, code, dtype=computed, shape=self.shape)

    def is_masked(self) -> bool:
        return self._load_mask is not None

    def unmasked(self) -> contextlib.AbstractContextManager[None]:
        return replaced(self, _load_mask=None)

    @contextlib.contextmanager
    def masked_by(self, mask: Any) -> Iterator[Any]:
        """Let loads read only where ``mask`` and those around it are true."""
        before: Any = self._load_mask
        if before is not None:
            mask = V.ops.logical_and(mask, before)
        mask = getattr(mask, "value", mask)
        with replaced(self, _load_mask=mask):
            yield mask


_LAUNCHER = "from torch_scan_hop._torch.triton_launch import ScanKernel"


def call_kernel(wrapper: Any, definition: str, arguments: Sequence[Any]) -> None:
    """Define a kernel in the wrapper, as ``ScanKernel(definition)``, and call it at this place.

    Arguments are names of buffers, or sizes.
    """
    name = f"scan_kernel_{wrapper.next_kernel_suffix()}"
    wrapper.define_kernel(name, f"ScanKernel({definition})", metadata=_LAUNCHER, gpu=False)
    scheduler: Any = V.graph.scheduler
    # a buffer that is written in place has a name for each time
    real = scheduler.mutation_real_name if scheduler is not None else {}
    texts = [
        real.get(a, a) if isinstance(a, str) else str(wrapper.codegen_sizevar(a)) for a in arguments
    ]
    wrapper.writeline(f"{name}({', '.join(texts)})")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a buffer of the graph at hand."""
    dtype: torch.dtype = V.graph.get_dtype(name)
    return dtype


def simplified(expression: Any) -> Any:
    return V.graph.sizevars.simplify(expression)


def is_graph_symbol(symbol: Any) -> bool:
    """Return True if ``symbol`` is an integer for which the wrapper has a variable."""
    return isinstance(symbol, sympy.Symbol) and bool(symbol.is_integer)
