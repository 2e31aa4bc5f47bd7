"""Bodies of scans as serialized HLO modules: written by hand, or lowered by torch_xla."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from torch_scan_hop.xla._hlo import INVARIANT, SLICED, assemble_scan

F32, S64, TUPLE = 11, 5, 13


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, value: int | bytes | str | Sequence[int]) -> bytes:
    """One protobuf field; a sequence of ints is written packed, nothing if it is empty."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    if isinstance(value, str):
        value = value.encode()
    elif not isinstance(value, bytes):
        if not value:
            return b""
        value = b"".join(map(varint, value))
    return varint(number << 3 | 2) + varint(len(value)) + value


def shape(element_type: int, dims: Sequence[int] = (), dynamic: Sequence[int] = ()) -> bytes:
    layout = field(1, range(len(dims))[::-1])
    return field(2, element_type) + field(3, dims) + field(5, layout) + field(6, dynamic)


def tuple_shape(*elements: bytes) -> bytes:
    return field(2, TUPLE) + b"".join(field(4, element) for element in elements)


def program_shape(parameters: Sequence[bytes], result: bytes, n_names: int | None = None) -> bytes:
    names = [f"p{k}" for k in range(len(parameters) if n_names is None else n_names)]
    return b"".join(
        [
            *(field(1, parameter) for parameter in parameters),
            field(2, result),
            *(field(3, name) for name in names),
        ]
    )


def instruction(
    id: int, opcode: str | bytes, result: bytes, operands: Sequence[int] = (), extra: bytes = b""
) -> bytes:
    name = opcode + f".{id}".encode() if isinstance(opcode, bytes) else f"{opcode}.{id}"
    text = field(1, name) + field(2, opcode) + field(3, result)
    return text + extra + field(35, id) + field(36, operands)


def module(parameters: Sequence[bytes], results: Sequence[bytes], entry_id: int = 100) -> bytes:
    """A module that returns its first parameter for every result; good enough to be read."""
    instructions = [
        instruction(k + 1, "parameter", parameter, extra=field(9, k))
        for k, parameter in enumerate(parameters)
    ]
    root = len(parameters) + 1
    instructions.append(instruction(root, "tuple", tuple_shape(*results), [1] * len(results)))
    program = program_shape(parameters, tuple_shape(*results))
    return wrap(instructions, program, root, entry_id)


def wrap(instructions: Sequence[bytes], program: bytes, root: int, entry_id: int = 100) -> bytes:
    computation = (
        field(1, f"body.{entry_id}")
        + b"".join(field(2, i) for i in instructions)
        + field(4, program)
        + field(5, entry_id)
        + field(6, root)
    )
    name = f"body.{entry_id}"
    return (
        field(1, name) + field(2, name) + field(3, computation) + field(4, program)
        + field(5, entry_id) + field(6, entry_id)
    )  # fmt: skip


class Lowered(NamedTuple):
    """A body in HLO: the role of each HLO parameter, and the tensor behind it."""

    hlo: bytes
    roles: list[int]
    tensors: list[Tensor]

    @property
    def inputs(self) -> list[Tensor]:
        """What the scan takes besides carries."""
        return [v for role, v in zip(self.roles, self.tensors, strict=True) if role < 0]


def lower(
    body: Callable, init: Sequence[Tensor], xs: Sequence[Tensor], invariants: Sequence[Tensor] = ()
) -> Lowered:
    """Lowers ``body(*carries, *slices, *invariants) -> (*carries, *ys)`` with torch_xla."""
    import torch_xla
    import torch_xla.core.xla_builder as xb

    tensors = [*init, *xs, *invariants]
    roles = [*range(len(init)), *[SLICED] * len(xs), *[INVARIANT] * len(invariants)]
    shapes = [
        v.shape[1:] if role == SLICED else v.shape for v, role in zip(tensors, roles, strict=True)
    ]
    placeholders = [
        xb.create_placeholder_tensor(tuple(shape), v.dtype)
        for shape, v in zip(shapes, tensors, strict=True)
    ]
    with torch.no_grad():
        outputs = list(body(*[v.clone() for v in placeholders]))
    context = torch_xla._XLAC.lowering.LoweringContext("Body")
    context.set_name_string("body")
    context.build(outputs)
    parameters = {
        context.tensor_parameter_id(placeholder): (role, v)
        for placeholder, role, v in zip(placeholders, roles, tensors, strict=True)
    }
    parameters.pop(-1, None)  # what the body does not use
    # Python scalars become parameters as well, which XLA hoists out of the graph.
    for k, hoisted in context.device_parameter_id_tensor_mapping().items():
        parameters.setdefault(k, (INVARIANT, hoisted))
    ordered = [parameters[k] for k in range(len(parameters))]
    return Lowered(context.hlo(), [role for role, _ in ordered], [v for _, v in ordered])


def run_on_xla(
    body: Callable,
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    invariants: Sequence[Tensor] = (),
    *,
    length: int,
    reverse: bool = False,
) -> list[Tensor]:
    """The scan of ``body`` on torch_xla's device, through ``assemble_scan``; results on the CPU."""
    import torch_xla
    import torch_xla.core.xla_builder as xb

    lowered = lower(body, init, xs, invariants)
    scan = assemble_scan(lowered.hlo, len(init), length, reverse, lowered.roles)
    results = torch_xla._XLAC._xla_user_computation(
        "xla::scan",
        [v.to("xla") for v in (*init, *lowered.inputs)],
        xb.computation_from_module_proto("scan", scan),
    )
    return [result.cpu() for result in results]


def python_loop(
    body: Callable,
    init: Sequence[Tensor],
    xs: Sequence[Tensor],
    invariants: Sequence[Tensor] = (),
    *,
    length: int,
    reverse: bool = False,
) -> list[Tensor]:
    """What ``run_on_xla`` must give."""
    carries = list(init)
    rows: list[list[Tensor]] = [[] for _ in range(length)]
    for t in reversed(range(length)) if reverse else range(length):
        outputs = body(*carries, *[x[t] for x in xs], *invariants)
        carries, rows[t] = list(outputs[: len(init)]), list(outputs[len(init) :])
    return [*carries, *[torch.stack(y) for y in zip(*rows, strict=True)]]


# --- what is in a module ---


class Computation(TypedDict):
    """One computation of an HLO module."""

    name: str
    id: int
    entry: bool
    opcodes: dict[str, int]
    #: ``(opcode, ids of the computations it calls)``; of a while: body, condition.
    calls: list[tuple[str, list[int]]]


def computations(module: bytes) -> list[Computation]:
    """The computations of a serialized ``HloModuleProto``, callees before callers."""
    found: list[Computation] = import_module("torch_scan_hop._C").computations(module)
    return found


def opcode_counts(module: bytes) -> Counter[str]:
    """How often each opcode occurs in the module, counting every computation once."""
    return _count(computations(module))


def loop_opcode_counts(module: bytes) -> Counter[str]:
    """How often each opcode occurs in what the module's while loops run at every step."""
    by_id = {computation["id"]: computation for computation in computations(module)}
    pending = [
        called[0] for c in by_id.values() for opcode, called in c["calls"] if opcode == "while"
    ]
    reached: dict[int, Computation] = {}
    while pending:
        identifier = pending.pop()
        if identifier in reached or identifier not in by_id:
            continue
        reached[identifier] = by_id[identifier]
        pending += [i for _, called in by_id[identifier]["calls"] for i in called]
    return _count(list(reached.values()))


def _count(found: list[Computation]) -> Counter[str]:
    total: Counter[str] = Counter()
    for computation in found:
        total.update(computation["opcodes"])
    return total
