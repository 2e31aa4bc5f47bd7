"""What is changed in Dynamo while it traces the steps of a scan: the first, and a body."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_scan_hop import tree
from torch_scan_hop._torch.dynamo.absent import absences_are_guarded
from torch_scan_hop._torch.dynamo.at_once import functions_at_once
from torch_scan_hop._torch.dynamo.attempts import side_effects_stay_one_object
from torch_scan_hop._torch.dynamo.class_attributes import attributes_of_classes_are_found
from torch_scan_hop._torch.dynamo.counted import counters_vary
from torch_scan_hop._torch.dynamo.deques import deques_are_bounded
from torch_scan_hop._torch.dynamo.divergences import find_divergence
from torch_scan_hop._torch.dynamo.facts import grad_functions_are_known
from torch_scan_hop._torch.dynamo.hooks import hooks_are_captured
from torch_scan_hop._torch.dynamo.modules import methods_have_functions
from torch_scan_hop._torch.dynamo.places import scalars_are_read
from torch_scan_hop._torch.dynamo.trees import (
    children,
    itself,
    leaves,
    leaves_but_none,
    mapped,
    matched,
    unflatten,
)
from torch_scan_hop._torch.tracing import lstm_in_parts
from torch_scan_hop.capture.hooks import hooked
from torch_scan_hop.capture.records import with_records, without_records

_AT_ONCE: dict[Callable[..., Any], Any] = {
    tree.leaves: leaves,
    tree.tensors: leaves_but_none,
    tree.children: children,
    tree.unflatten: unflatten,
    tree.match_carry: functools.partial(matched, tree.match_carry),
    tree.map_leaves: mapped,
    with_records: itself,
    without_records: itself,
    torch.distributions.kl_divergence: find_divergence,
}


@contextlib.contextmanager
def steps_are_traced(tx: Any, operator: Any) -> Iterator[None]:
    with (
        hooks_are_captured(hooked, operator),
        methods_have_functions(),
        grad_functions_are_known(),
        absences_are_guarded(),
        functions_at_once(_AT_ONCE),
        attributes_of_classes_are_found(),
        deques_are_bounded(tx),
        counters_vary(tx),
        side_effects_stay_one_object(tx),
        scalars_are_read(tx),
        lstm_in_parts(),  # in the first step, too: torch 2.9 has wrong shapes otherwise
    ):
        yield
