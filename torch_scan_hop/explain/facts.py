"""The facts about a scan, as plain data: all of it can be written as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

# the places where an operator of a body may run
ONCE = "before the loop, once"
ALL_STEPS = "before the loop, for all steps at once"
LOOP = "in the loop"
AFTER = "after the loop, for all steps at once"
CONTRACTED = "after the loop, as one sum over all steps"
DROPPED = "dropped"
PLACES = (ONCE, ALL_STEPS, LOOP, AFTER, CONTRACTED, DROPPED)

# the kinds of values that a value may depend on
INVARIANT, XS, CARRY = "invariant", "xs", "carry"


@dataclass(frozen=True)
class Leaf:
    """A tensor of the signature: ``role`` is carry, x, y or closure."""

    role: str
    path: str
    type: str
    nbytes: int
    requires_grad: bool = False


@dataclass(frozen=True)
class Value:
    """An input or a result of a step, as the drawing shows it."""

    name: str
    node: str
    type: str
    depends_on: str


@dataclass(frozen=True)
class Operator:
    """A node of a step's graph; ``flops`` and ``nbytes_moved`` are those of one step."""

    name: str
    call: str
    type: str
    nbytes: int
    place: str
    depends_on: str
    why: str
    line: str
    inputs: tuple[str, ...]
    flops: int
    nbytes_moved: int


@dataclass(frozen=True)
class Work:
    """The work of all steps.

    ``nbytes``: as each operator reads and writes; ``least_nbytes``: if the inputs were read and the
    results written once. ``seconds`` and the rest: with limits only.
    """

    flops_per_step: int
    nbytes_per_step: int
    flops: int
    nbytes: int
    least_nbytes: int
    seconds: float | None = None
    least_seconds: float | None = None
    limit: str | None = None
    fraction_of_limit: float | None = None


@dataclass(frozen=True)
class Loop:
    """One loop that runs: that of the forward or of the backward, or one nested in these."""

    name: str
    steps: str
    reverse: bool
    inputs: tuple[Value, ...]
    results: tuple[Value, ...]
    operators: tuple[Operator, ...]
    work: Work
    block: int | None = None
    note: str = ""
    nested: tuple[Loop, ...] = ()


@dataclass(frozen=True)
class Residual:
    """A value that the backward reads; ``kept`` for that alone, or an input or a result anyway."""

    name: str
    type: str
    nbytes: int
    kept: bool
    per_step: bool
    source: str
    read_by: str
    line: str


@dataclass(frozen=True)
class Memory:
    """The values that the forward keeps for the backward."""

    residuals: tuple[Residual, ...]
    nbytes_per_step: int
    nbytes: int


@dataclass(frozen=True)
class Resources:
    """The resources that a program of a GPU's kernel takes, None where not known, when it is
    compiled for a compute ``capability``; 90 is 9.0."""

    elements: str
    warps: int
    shared: int | None
    registers: int | None
    spilled: int | None
    capability: int
    #: why it is not known
    note: str = ""


@dataclass(frozen=True)
class Kernel:
    """The kernel that Inductor makes of one loop, and why it is no better one."""

    loop: str
    kind: str
    steps: str
    operators: str
    why_not: dict[str, str] = field(default_factory=dict)
    #: on a GPU: what is launched in a call, and what a program of that takes
    launches: str = ""
    program: Resources | None = None


@dataclass(frozen=True)
class Scan:
    """One scan of the program."""

    name: str
    steps: str
    reverse: bool
    signature: tuple[Leaf, ...]
    loops: tuple[Loop, ...]
    memory: Memory | None = None
    kernels: tuple[Kernel, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Captures:
    """The number of a body's captures, and the guard that called for each but the first."""

    count: int
    guards: tuple[str, ...]


@dataclass(frozen=True)
class Checkpoint:
    """The bytes saved with the policy, without one, and while a segment that is run again is
    differentiated."""

    policy: str
    nbytes: int
    nbytes_without: int
    nbytes_of_segment: int
    cost: str
