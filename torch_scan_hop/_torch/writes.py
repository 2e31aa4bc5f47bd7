"""What is written to tensors, taken back (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class WritesTakenBack(TorchDispatchMode):
    """Keeps what is in the memory that operators write to within, and puts it back behind.

    Of tensors that it is told of, it puts back what is no operator's doing: ``t.data = ...``,
    ``t.grad``, ``t.requires_grad_()``, hooks, and how often they were written to.
    """

    def __init__(self) -> None:
        super().__init__()
        #: by address, with the memory itself: else another one could be there later
        self.memory: dict[int, tuple[Any, Any]] = {}
        self.tensors: list[tuple[torch.Tensor, Any, int | None, Any, bool, Any]] = []

    def keep(self, tensor: torch.Tensor) -> None:
        version = None if tensor.is_inference() else tensor._version
        hooks = [(getattr(tensor, name), dict(getattr(tensor, name) or {})) for name in _HOOKS]
        grad = tensor.grad if tensor.is_leaf else None
        where = (tensor.detach(), _place_of(tensor))
        kept = (tensor, where, version, grad, tensor.requires_grad, hooks)
        self.tensors.append(kept)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = (argument.name for argument in func._schema.arguments)
        given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            # batch norms do not declare that they write to their statistics
            is_written = argument.is_write or argument.name.startswith("running_")
            written = given.get(argument.name) if is_written else None
            for tensor in written if isinstance(written, (list, tuple)) else [written]:
                self._keep_memory(tensor)
        return func(*args, **(kwargs or {}))

    def _keep_memory(self, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            memory = tensor.untyped_storage()
            if memory._cdata not in self.memory and memory.device.type != "meta":
                self.memory[memory._cdata] = memory, memory.clone()

    def take_back(self) -> None:
        for memory, before in self.memory.values():
            if memory.nbytes() != before.nbytes():
                memory.resize_(before.nbytes())
            memory.copy_(before)
        for tensor, (before, place), version, grad, requires_grad, hooks in self.tensors:
            if not (tensor.is_leaf or requires_grad or tensor._is_view()):
                tensor.detach_()  # it had no history
            if tensor.is_leaf and tensor.grad is not grad:
                tensor.grad = grad
            if tensor.is_leaf and tensor.requires_grad != requires_grad:
                tensor.requires_grad_(requires_grad)
            for name, (was, held) in zip(_HOOKS, hooks, strict=True):
                _put_hooks_back(tensor, name, was, held)
            if _place_of(tensor) != place:
                tensor.data = before
            if version is not None and tensor._version != version:
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def _put_hooks_back(tensor: torch.Tensor, name: str, was: Any, held: dict[int, Any]) -> None:
    now = getattr(tensor, name)
    if now is not was:
        setattr(tensor, name, was)
    elif was is not None and dict(was) != held:
        was.clear()
        was.update(held)


def _place_of(tensor: torch.Tensor) -> Any:
    """Return the memory of ``tensor``, and where in it and how the tensor lies."""
    if tensor.layout is not torch.strided:
        return None
    lies = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
    return tensor.untyped_storage()._cdata, lies
