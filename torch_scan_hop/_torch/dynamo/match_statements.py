"""``match`` of a tuple that holds tensors (checked on torch 2.9.1, 2.13.0, 2.15.0)."""

from __future__ import annotations

import dis
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.lists import BaseListVariable

from torch_scan_hop._torch.replaced import replaced

_MATCH = "MATCH_SEQUENCE"


def sequences_are_matched() -> AbstractContextManager[None]:
    """Within, a tuple or a list is a sequence whatever it holds; to Dynamo until 2.9, only one of
    constants is."""
    original: Any = getattr(InliningInstructionTranslator, _MATCH)

    def match_sequence(self: Any, instruction: Any) -> None:
        subject = self.stack[-1].realize()
        if not isinstance(subject, BaseListVariable):
            return original(self, instruction)
        self.push(ConstantVariable.create(issubclass(subject.python_type(), Sequence)))
        return None

    table = [*InliningInstructionTranslator.dispatch_table]
    table[dis.opmap[_MATCH]] = match_sequence
    return replaced(InliningInstructionTranslator, dispatch_table=table)
