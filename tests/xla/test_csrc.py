"""``torch_scan_hop._C`` on hand-written modules: what it writes, and all that it refuses.

``test_csrc_xla.py`` runs what it writes.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hlo_bodies import (
    F32,
    S64,
    TUPLE,
    computations,
    field,
    instruction,
    loop_opcode_counts,
    module,
    opcode_counts,
    program_shape,
    shape,
    tuple_shape,
    varint,
    wrap,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from resident import least_growth

from torch_scan_hop.xla import _hlo
from torch_scan_hop.xla._hlo import INVARIANT, SLICED, assemble_scan

_C = pytest.importorskip("torch_scan_hop._C", exc_type=ImportError)

CARRY = shape(F32, [2, 3])
ROW = shape(F32, [4])
STEP = shape(S64)
# (carry 0, x row, weight) -> (carry 0, carry 1, y): carry 1 is never read.
BODY = module([CARRY, ROW, STEP], [CARRY, STEP, ROW])
ROLES = [0, SLICED, INVARIANT]


def assemble(body=BODY, n_carry=2, length=5, reverse=False, roles=ROLES, name="scan"):
    return assemble_scan(body, n_carry, length, reverse, roles, name)


def messages(message: bytes) -> list[tuple[int, int | bytes]]:
    """The fields of a message: an independent reader, for what XLA writes and we write."""
    out: list[tuple[int, int | bytes]] = []
    position = 0

    def read() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        key = read()
        value = read()
        if key & 7 == 0:
            out.append((key >> 3, value))
        else:
            assert key & 7 == 2
            out.append((key >> 3, message[position : position + value]))
            position += value
    return out


# ------------------------------------------------------------------ what it writes


def test_loop_structure():
    loop = loop_opcode_counts(assemble())
    assert loop["dynamic-slice"] == loop["dynamic-update-slice"] == loop["call"] == 1
    assert loop["subtract"] == 0 and loop["while"] == 0
    assert loop_opcode_counts(assemble(reverse=True))["subtract"] == 1
    assert opcode_counts(assemble())["while"] == 1


def test_entry_signature():
    program = next(value for number, value in messages(assemble()) if number == 4)
    shapes = [value for number, value in messages(program) if number in (1, 2)]
    inputs = [CARRY, STEP, shape(F32, [5, 4]), STEP]  # carries, then other parameters in body order
    assert shapes == [*inputs, tuple_shape(CARRY, STEP, shape(F32, [5, 4]))]
    assert sum(number == 3 for number, _ in messages(program)) == len(inputs)  # their names


def test_body_is_copied_verbatim_and_callees_come_first():
    body_computation = next(value for number, value in messages(BODY) if number == 3)
    written = [value for number, value in messages(assemble()) if number == 3]
    assert written[0] == body_computation
    seen: set[int] = set()
    for computation in computations(assemble()):
        assert {i for _, called in computation["calls"] for i in called} <= seen
        seen.add(computation["id"])
    assert [c["entry"] for c in computations(assemble())] == [False, False, False, True]


def test_trip_count_and_name():
    assert b'{"known_trip_count":{"n":"5"}}' in assemble()
    assert assemble() == assemble()
    name = next(value for number, value in messages(assemble(name="größe")) if number == 1)
    assert name.decode().startswith("größe.")


def test_new_ids_and_names_are_free():
    """Also where a name of the body ends in a number above all of its ids."""
    parameter = instruction(1, "parameter", STEP, extra=field(9, 0))
    parameter = parameter.replace(b"parameter.1", b"parameter.9")
    root = instruction(2, "tuple", tuple_shape(STEP), [1])
    body = wrap([parameter, root], program_shape([STEP], tuple_shape(STEP)), root=2, entry_id=3)
    scan = assemble(body, 1, 5, False, [0])
    names, ids = [], []
    for computation in [value for number, value in messages(scan) if number == 3]:
        for number, value in messages(computation):
            if number == 2:
                names += [v for n, v in messages(value) if n == 1]
                ids += [v for n, v in messages(value) if n == 35]
            elif number == 5:
                ids.append(value)
    assert len(set(names)) == len(names) and len(set(ids)) == len(ids)
    assert min(set(ids) - {1, 2, 3}) == 10


def test_an_assembled_scan_is_a_body():
    inner = assemble()
    outer = assemble(inner, 2, 3, roles=[0, 1, INVARIANT, INVARIANT])
    assert opcode_counts(outer)["while"] == 2 and loop_opcode_counts(outer)["while"] == 1


def test_size_grows_linearly():
    def size(n):
        return len(assemble(module([ROW] * n, [ROW] * n), n, 5, False, range(n)))

    assert size(2000) < 2.5 * size(1000)


def test_arguments_by_keyword():
    assert assemble() == _C.assemble_scan(
        body=BODY, n_carry=2, length=5, reverse=False, roles=tuple(ROLES), name="scan"
    )


# ------------------------------------------------------------------ what it refuses


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"length": -3}, "length must be at least 1"),
        ({"length": 2**31}, "length must fit in 32 bits"),
        ({"length": 2**70}, "length does not fit in 64 bits"),
        ({"n_carry": -1}, "n_carry must not be negative"),
        ({"n_carry": 4}, "the body returns only 3 values"),
        ({"n_carry": 2**63 - 1}, "the body returns only 3 values"),
        ({"n_carry": 2**63}, "n_carry does not fit in 64 bits"),
        ({"roles": [0, SLICED]}, "2 roles for a body of 3 parameters"),
        ({"roles": []}, "0 roles"),
        ({"roles": [2, SLICED, INVARIANT]}, "parameter 0 is carry 2, but there are only 2"),
        ({"roles": [2**62, SLICED, INVARIANT]}, "there are only 2 carries"),
        ({"roles": [-(2**70), SLICED, INVARIANT]}, "a role does not fit in 64 bits"),
        ({"roles": [0, SLICED, 0]}, r"changes carry 0 from s64\[\] to f32\[2,3\]"),
        ({"roles": [1, SLICED, INVARIANT]}, r"changes carry 1 from f32\[2,3\] to s64\[\]"),
        ({"roles": [0, -3, INVARIANT]}, "unknown role -3 of parameter 1"),
        ({"name": ""}, "name must not be empty"),
        ({"name": "a\0b"}, "null"),
        ({"name": "\ud800"}, "surrogates"),
    ],
)
def test_bad_arguments(changes, message):
    with pytest.raises(ValueError, match=message):
        assemble(**changes)


@pytest.mark.parametrize(
    "changes",
    [{"body": "text"}, {"n_carry": 1.5}, {"roles": 3}, {"roles": ["0"] * 3}, {"name": b"scan"}],
)
def test_bad_types(changes):
    with pytest.raises(TypeError):
        assemble(**changes)


def test_duplicated_carry():
    body = module([STEP, STEP], [STEP])
    with pytest.raises(ValueError, match="two parameters have the role of carry 0"):
        assemble(body, 1, roles=[0, 0])


def test_exceptions_of_the_roles_pass_through():
    class Roles:
        def __len__(self):
            return 10**12

        def __getitem__(self, index):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        assemble(roles=Roles())


def returns(*results):
    return wrap([instruction(1, "parameter", STEP)], program_shape([STEP], *results), root=1)


def with_parameter(parameter):
    return module([parameter], [STEP])


BROKEN = {
    "empty": (b"", "no entry computation"),
    "key cut off": (b"\xff", "truncated varint"),
    "varint over 64 bits": (b"\x08" + b"\xff" * 9 + b"\x02", "longer than 64 bits"),
    "varint without end": (b"\x08" + b"\xff" * 20, "longer than 64 bits"),
    "field cut off": (b"\x1a\x05abc", "5 bytes where 3 are left"),
    "length near 2**64": (b"\x1a" + varint(2**64 - 1), "truncated message"),
    "group": (b"\x0b\x0c", "bad wire type 3"),
    "wire type 7": (b"\x0f", "bad wire type 7"),
    "field number 0": (b"\x00\x00", "bad field number 0"),
    "field number 2**29": (varint(2**32) + b"\x00", "bad field number"),
    "computations as integer": (field(3, 7), "computation has the wrong wire type"),
    "entry id as bytes": (field(6, b"abc"), "entry computation id has the wrong wire type"),
    "entry id negative": (field(6, -1), "entry computation id out of range"),
    "entry id without computation": (field(6, 5), "no computation has the entry id 5"),
    "computation without name": (field(3, field(5, 1)) + field(6, 1), "without a name"),
    "computation with empty name": (field(3, field(1, "")), "computation name is empty"),
    "name not UTF-8": (field(3, field(1, b"\xff\xfe")), "computation name is not valid UTF-8"),
    "name overlong": (field(3, field(1, b"\xe0\x80\x80")), "not valid UTF-8"),
    "name with surrogate": (field(3, field(1, b"\xed\xa0\x80")), "not valid UTF-8"),
    "name cut off": (field(3, field(1, b"\xf0\x9f\x98")), "not valid UTF-8"),
    "instruction without name": (field(3, field(2, field(2, "add"))), "instruction without a name"),
    "instruction without opcode": (field(3, field(2, field(1, "a"))), "without an opcode"),
    "opcode not UTF-8": (wrap([instruction(1, b"\x80", STEP)], b"", 1), "not valid UTF-8"),
    "instruction id too large": (wrap([instruction(2**31, "add", STEP)], b"", 1), "out of range"),
    "no id left": (module([STEP], [STEP], entry_id=2**31 - 1), "no HLO id free"),
    "no program shape": (wrap([], b"", 1), "no result shape"),
    "result not a tuple": (returns(STEP), "must return a tuple"),
    "nested tuple": (returns(tuple_shape(tuple_shape(STEP))), "result 0 is a tuple"),
    "token": (returns(tuple_shape(shape(17))), "result 0 is not an array"),
    "element type 0": (returns(tuple_shape(shape(0))), "result 0 is not an array"),
    "element type negative": (returns(tuple_shape(shape(-4))), "result 0 is not an array"),
    "tuple parameter": (with_parameter(tuple_shape(STEP)), "parameter 0 is a tuple"),
    "dynamic": (with_parameter(shape(F32, [3], [1])), "parameter 0 has dynamic"),
    "unbounded": (with_parameter(shape(F32, [-(2**63)])), "dynamic or negative"),
    "too large": (with_parameter(shape(F32, [2**32, 2**31])), "parameter 0 is too large"),
    "too large but empty": (with_parameter(shape(F32, [2**62, 0, 2**62])), "is too large"),
    "parameter without name": (
        wrap([instruction(1, "parameter", STEP)], program_shape([STEP], tuple_shape(STEP), 0), 1),
        "names 0 of its 1 parameters",
    ),
    "parameter without instruction": (
        wrap([], program_shape([STEP], tuple_shape(STEP)), 1),
        "0 parameter instructions, its program shape 1",
    ),
}


@pytest.mark.parametrize(("body", "message"), BROKEN.values(), ids=BROKEN)
def test_malformed_module(body, message):
    with pytest.raises(ValueError, match=message):
        assemble(body, 1, 4, False, [0])


def test_deep_nesting_does_not_recurse():
    nested = STEP
    for _ in range(20_000):
        nested = field(2, TUPLE) + field(4, nested)
    with pytest.raises(ValueError, match="is a tuple"):
        assemble(returns(tuple_shape(nested)), 1, 4, False, [0])


def test_stacked_size_overflow():
    body = module([shape(F32, [2**40])], [shape(F32, [2**40])])
    with pytest.raises(ValueError, match=r"steps of f32\[1099511627776\] is too large"):
        assemble(body, 0, 2**30, False, [INVARIANT])
    with pytest.raises(ValueError, match="too large"):
        assemble(body, 1, 2**30, False, [SLICED])


def test_every_truncation():
    for end in range(len(BODY)):
        attempt(BODY[:end])
    # Cut within a field, the module is always recognised as malformed.
    with pytest.raises(ValueError, match="truncated"):
        assemble(BODY[:-1])


def attempt(body: bytes) -> None:
    """Succeeds or raises ValueError; anything else fails the test."""
    try:
        result = assemble(body)
    except ValueError:
        return
    assert computations(result)


def mutate(body: bytes, generator: random.Random) -> bytes:
    mutated = bytearray(body)
    for _ in range(generator.randint(1, 4)):
        position = generator.randrange(len(mutated))
        match generator.randrange(4):
            case 0:
                mutated[position] ^= 1 << generator.randrange(8)
            case 1:
                mutated[position] = generator.choice([0, 1, 0x7F, 0x80, 0xFF])
            case 2:
                del mutated[position : position + generator.randint(1, 4)]
            case 3:
                bits = generator.choice([7, 32, 64])
                mutated[position:position] = varint(generator.getrandbits(bits))
        mutated = mutated or bytearray(b"\0")
    return bytes(mutated)


@pytest.mark.parametrize("seed", range(4))
def test_mutations(seed):
    generator = random.Random(seed)
    for _ in range(5_000):
        attempt(mutate(BODY, generator))


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes(body):
    attempt(body)


@settings(deadline=None)
@given(st.binary(max_size=60), st.sampled_from([1, 2, 3, 4, 6]))
def test_random_field(payload, number):
    attempt(BODY + field(number, payload))
    attempt(field(number, payload) + BODY)


@settings(deadline=None)
@given(
    n_carry=st.integers(-(2**65), 2**65),
    length=st.integers(-(2**65), 2**65),
    roles=st.lists(st.integers(-4, 4) | st.integers(-(2**65), 2**65), max_size=6),
)
def test_random_arguments(n_carry, length, roles):
    try:
        assemble(BODY, n_carry, length, False, roles)
    except ValueError:
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_leak():
    big = module([shape(F32, [k]) for k in range(2000)], [STEP])
    roles = [INVARIANT] * 2000

    def work():
        for _ in range(50):
            computations(assemble(big, 0, 5, False, roles))
            with pytest.raises(ValueError, match="carries"):
                assemble(big, 0, 5, False, [*roles[:-1], 7])

    work()
    assert least_growth(work, enough=8 << 20) < 8 << 20


# ------------------------------------------------------------------ the package around it


def test_absence_is_explained(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_scan_hop._C", None)
    monkeypatch.delattr(sys.modules["torch_scan_hop"], "_C", raising=False)
    with pytest.raises(_hlo.ExtensionNotBuiltError, match=r"C\+\+17 compiler.*--force-reinstall"):
        assemble()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_sanitizers():
    root = Path(__file__).parents[2]
    done = subprocess.run(
        ["make", "fuzz"], cwd=root, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no crash" in done.stdout
