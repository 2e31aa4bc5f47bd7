"""CompositeExplicitAutograd: the scan on real tensors, below autograd."""

from __future__ import annotations

from torch_scan_hop._torch.operators import DispatchKey
from torch_scan_hop.eager.run import dense, step_by_step
from torch_scan_hop.op import scan_op

scan_op.kernel(DispatchKey.CompositeExplicitAutograd)(dense)
scan_op.users_modes_kernel(step_by_step)
