"""Regions of a graph that Dynamo has captured, in a trace for export (checked on torch 2.9.1,
2.13.0, 2.15.0).

Such a trace sees a Python loop's operators one by one, where autocast is on, and inside of
``torch.utils.checkpoint``. A captured graph has nodes for both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_ENTER, _EXIT = torch.amp._enter_autocast, torch.amp._exit_autocast
_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def running_regions(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``body``, whose regions run as the code that they were captured from.

    A trace for export writes down that a graph enters autocast, and does not enter it: operators
    there would be taken to compute in the dtypes of their arguments. And torch 2.9 leaves what is
    in a checkpoint as captured, which its exported programs must not hold.
    """
    if isinstance(body, fx.GraphModule) and any(n.target in _REGIONS for n in body.graph.nodes):
        return _RunningRegions(body).run
    return body


_REGIONS = {_ENTER, _CHECKPOINT}


class _RunningRegions(fx.Interpreter):
    def run(self, *args: Any, **kwargs: Any) -> Any:
        self._entered: list[Any] = []
        try:
            return super().run(*args, **kwargs)
        finally:
            while self._entered:  # an operator has failed
                self._entered.pop().__exit__(None, None, None)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is _CHECKPOINT:
            region, *operands = args
            return running_regions(region)(*operands)
        if target is _ENTER:
            self._entered.append(torch.amp.autocast_mode.autocast(*args))
            return self._entered[-1].__enter__()  # tells the trace, too
        if target is _EXIT:
            (mode,) = args
            self._entered.remove(mode)
            return mode.__exit__(None, None, None)
        return super().call_function(target, args, kwargs)
