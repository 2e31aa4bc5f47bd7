"""``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` as scans: their arguments, parameters, shapes and errors.

They are ``nn.RNNBase``, which has the parameters and checks the arguments; what runs is a scan for
each layer and direction. Whatever a scan can do they can: double backward, ``vmap``, ``compile``,
export with any trip count, and ``lengths=``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torch_scan_hop import tree
from torch_scan_hop.capture.refusals import refused
from torch_scan_hop.errors import ScanTypeError
from torch_scan_hop.nn.over_time import over_time, run_packed, valid_steps

Weights = dict[str, Tensor]
Module = TypeVar("Module", bound=nn.Module)


class _Layers(nn.RNNBase):
    """One layer after another. A state is a tensor ``[layers * directions, B, H]``, or a tuple."""

    step: Callable[..., Any]
    #: keyword arguments for ``scan``
    options: dict[str, Any] | None = None

    def _state_sizes(self) -> list[int]:
        """Return the sizes of the state's leaves."""
        return [self.hidden_size]

    def forward(
        self,
        input: Tensor | PackedSequence,
        hx: Any = None,
        *,
        lengths: Tensor | Sequence[int] | None = None,
    ) -> tuple[Any, Any]:
        """Run as torch.nn's layer does; ``lengths``: of each sequence in a padded batch."""
        if isinstance(input, PackedSequence):
            if lengths is not None:
                raise refused(
                    ScanTypeError,
                    f"{type(self).__name__}: a PackedSequence has lengths of its own: pass none.",
                )
            data, batch_sizes = input.data, input.batch_sizes
            run = lambda x, state, valid: self._run(  # noqa: E731
                x, self._checked(data, x, state, batch_sizes), valid
            )
            return run_packed(run, input, hx, 1)
        is_batched = self._check_dimensions(input, hx)
        batch_dim = 0 if self.batch_first else 1
        if not is_batched:
            input = input.unsqueeze(batch_dim)
            hx = None if hx is None else tree.map_leaves(lambda leaf: leaf.unsqueeze(1), hx)
        x = input.transpose(0, 1) if self.batch_first else input
        state = self._checked(input, x, hx, None)
        valid = None if lengths is None else valid_steps(lengths, x)
        ys, state = self._run(x, state, valid)
        ys = ys.transpose(0, 1) if self.batch_first else ys
        if not is_batched:
            return ys.squeeze(batch_dim), tree.map_leaves(lambda leaf: leaf.squeeze(1), state)
        return ys, state

    def _check_dimensions(self, input: Tensor, hx: Any) -> bool:
        """Return True if the input has a batch; raise torch.nn's errors for a wrong shape."""
        name = type(self).__name__
        if input.dim() not in (2, 3):
            tensor = " tensor" if name == "RNN" else ""
            raise ValueError(
                f"{name}: Expected input to be 2D or 3D, got {input.dim()}D{tensor} instead"
            )
        if hx is not None:
            self._check_hx_dimensions(hx, input.dim())
        return input.dim() == 3

    def _check_hx_dimensions(self, hx: Any, dim: int) -> None:
        if hx.dim() != dim:
            batched = "batched" if dim == 3 else "unbatched"
            raise RuntimeError(
                f"For {batched} {dim}-D input, hx should also be {dim}-D but got "
                f"{hx.dim()}-D tensor"
            )

    def _checked(self, input: Tensor, x: Tensor, hx: Any, batch_sizes: Tensor | None) -> Any:
        """Return ``hx``, or zeros; ``input`` is as it was given, ``x`` time first."""
        if hx is None:
            count = self.num_layers * (2 if self.bidirectional else 1)
            zeros = [x.new_zeros(count, x.shape[1], size) for size in self._state_sizes()]
            hx = tuple(zeros) if len(zeros) > 1 else zeros[0]
        self.check_forward_args(input, hx, batch_sizes)
        return hx

    def _run(self, x: Tensor, state: Any, valid: Tensor | None) -> tuple[Tensor, Any]:
        directions = ("", "_reverse") if self.bidirectional else ("",)
        last: list[Any] = []
        for layer in range(self.num_layers):
            if layer and self.dropout:
                x = F.dropout(x, self.dropout, self.training)
            outputs = []
            for direction in directions:
                cell = functools.partial(self.step, self._weights(f"_l{layer}{direction}"))
                own = tree.map_leaves(lambda leaf: leaf[len(last)], state)
                how = {"valid": valid, "reverse": bool(direction), **(self.options or {})}
                ys, own = over_time(cell, x, own, layer=self, **how)
                outputs.append(ys)
                last.append(_as_given_out(own, ys))
            x = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        return x, pytree.tree_map(lambda *leaves: torch.stack(leaves), *last)

    def _weights(self, suffix: str) -> Weights:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")
        found = {name: getattr(self, name + suffix, None) for name in names}
        return {name: weight for name, weight in found.items() if weight is not None}


def _as_given_out(state: Any, ys: Tensor) -> Any:
    """Return the last h in ys' dtype, as torch.nn does: under autocast a y may be narrower."""
    if isinstance(state, tuple):
        h, c = state
        return h.to(ys.dtype), c
    return state.to(ys.dtype)


def _products(weights: Weights, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    return (
        F.linear(x, weights["weight_ih"], weights.get("bias_ih")),
        F.linear(h, weights["weight_hh"], weights.get("bias_hh")),
    )


class LSTM(_Layers):
    """``nn.LSTM`` as scans, with its arguments, parameters and results.

    ``load_state_dict`` takes what ``nn.LSTM`` saved. ``lengths=`` in the call says how long each
    sequence of a padded batch is. The attribute ``options`` is a dict of keyword arguments for
    :func:`torch_scan_hop.scan`, for example ``{"compile": True}``.

    Example:
        >>> torchs = nn.LSTM(3, 4, num_layers=2, bidirectional=True)
        >>> ours = LSTM(3, 4, num_layers=2, bidirectional=True)
        >>> ours.load_state_dict(torchs.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(5, 2, 3)
        >>> bool(torch.allclose(ours(x)[0], torchs(x)[0], atol=1e-6))
        True
    """

    check_forward_args = nn.LSTM.check_forward_args  # type: ignore[assignment]
    get_expected_cell_size = nn.LSTM.get_expected_cell_size

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("LSTM", *args, **kwargs)

    def _state_sizes(self) -> list[int]:
        return [self.proj_size or self.hidden_size, self.hidden_size]

    def _check_hx_dimensions(self, hx: Any, dim: int) -> None:
        h, c = hx
        if h.dim() != dim or c.dim() != dim:
            batched = "batched" if dim == 3 else "unbatched"
            raise RuntimeError(
                f"For {batched} {dim}-D input, hx and cx should also be {dim}-D but got "
                f"({h.dim()}-D, {c.dim()}-D) tensors"
            )

    @staticmethod
    def step(weights: Weights, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        of_x, of_h = _products(weights, x, h)
        i, f, g, o = (of_x + of_h).chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (F.linear(h, weights["weight_hr"]) if "weight_hr" in weights else h), c


class GRU(_Layers):
    """``nn.GRU`` as scans: see :class:`LSTM`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_projection(kwargs)
        super().__init__("GRU", *args, **kwargs)

    @staticmethod
    def step(weights: Weights, x: Tensor, h: Tensor) -> Tensor:
        of_x, of_h = _products(weights, x, h)
        (r_x, z_x, n_x), (r_h, z_h, n_h) = of_x.chunk(3, -1), of_h.chunk(3, -1)
        r, z = torch.sigmoid(r_x + r_h), torch.sigmoid(z_x + z_h)
        n = torch.tanh(n_x + r * n_h)
        return n + z * (h - n)


class RNN(_Layers):
    """``nn.RNN`` as scans: see :class:`LSTM`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        _refuse_projection(kwargs)
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(
                f"Unknown nonlinearity '{nonlinearity}'. Select from 'tanh' or 'relu'."
            )
        self.nonlinearity = nonlinearity
        super().__init__(
            f"RNN_{nonlinearity.upper()}", input_size, hidden_size, num_layers, *args, **kwargs
        )

    @property
    def step(self) -> Callable[..., Any]:  # type: ignore[override]
        """One function for all calls: a method would be another object at each."""
        return _relu_step if self.nonlinearity == "relu" else _tanh_step


def _tanh_step(weights: Weights, x: Tensor, h: Tensor) -> Tensor:
    of_x, of_h = _products(weights, x, h)
    return torch.tanh(of_x + of_h)


def _relu_step(weights: Weights, x: Tensor, h: Tensor) -> Tensor:
    of_x, of_h = _products(weights, x, h)
    return torch.relu(of_x + of_h)


def _refuse_projection(kwargs: dict[str, Any]) -> None:
    if "proj_size" in kwargs:
        raise ValueError("proj_size argument is only supported for LSTM, not RNN or GRU")


# torch_xla puts a GRU of its own into torch.nn
_OURS: dict[type[nn.Module], type[_Layers]] = {
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.modules.rnn.GRU: GRU,
    nn.RNN: RNN,
}


def convert(model: Module) -> Module:
    """Replace torch.nn's ``LSTM``, ``GRU`` and ``RNN`` in ``model`` by this package's; return it.

    The model is changed in place, but if the model itself is such a layer a new one is returned.
    Parameters, hooks and modes are the same objects. Layers of derived classes are left alone.

    Example:
        >>> model = nn.ModuleDict({"encoder": nn.GRU(3, 4), "head": nn.Linear(4, 2)})
        >>> type(convert(model)["encoder"])
        <class 'torch_scan_hop.nn.like_torch.GRU'>
    """
    made: dict[nn.Module, nn.Module] = {}
    for module in [*model.modules()]:
        if type(module) in _OURS:
            ours = object.__new__(_OURS[type(module)])
            ours.__dict__ = module.__dict__
            made[module] = ours
    for path, module in [*model.named_modules(remove_duplicate=False)]:
        if path and module in made:
            owner, _, name = path.rpartition(".")
            setattr(model.get_submodule(owner), name, made[module])
    return made.get(model, model)  # type: ignore[return-value]
