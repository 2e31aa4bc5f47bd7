"""``python -m tests.fuzz --programs 2000 --modes eager --isolate --shrink``."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path

import torch

from .campaign import (
    Found,
    Tally,
    printed,
    run_here,
    run_isolated,
    shrunk,
    tell_as_child,
    timed,
)
from .check import show
from .generate import DEFAULT, SWITCHES, generate
from .modes import GROUPS, parse_modes, prepare
from .mutants import MUTANTS, record_searches, search
from .record import record


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    add = parser.add_argument
    add("--programs", type=int, default=0, help="how many (100)")
    add("--seed", type=int, default=0, help="of the first program (0)")
    add("--modes", default="", help=f"comma-separated (eager); groups: {', '.join(GROUPS)}")
    add("--features", default="", help=f"of {','.join(DEFAULT)}; switches: {','.join(SWITCHES)}; "
        "+name adds one to the default, -name takes one away")  # fmt: skip
    add("--isolate", action="store_true", help="run chunks of programs in child processes")
    add("--shrink", action="store_true", help="make one program of each kind of failure small")
    add("--shrink-seconds", type=float, default=60.0, help="for each (60)")
    add("--shrink-limit", type=int, default=12, help="at most so many (12)")
    add("--record", type=Path, help="append a row to this page")
    add("--print", action="store_true", help="print the programs, run nothing")
    add("--run", type=Path, help="check the program in this file")
    add("--until-found", choices=sorted(MUTANTS), help="run with a mend taken out; --modes and "
        "--features are the mutant's own unless given")  # fmt: skip
    add("--mutants", action="store_true", help="do so for every mutant; a table")
    add("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def chosen_features(text: str) -> tuple[str, ...]:
    """
    >>> chosen_features("+random,-complex")[-1]
    'random'
    """
    words = [w for w in text.split(",") if w]
    unknown = {w.lstrip("+-") for w in words} - {*DEFAULT, *SWITCHES}
    if unknown:
        raise SystemExit(f"no features {sorted(unknown)}")
    named = tuple(w for w in words if w[0] not in "+-")
    features = [f for f in (named or DEFAULT) if f"-{f}" not in words]
    return (*features, *(w[1:] for w in words if w[0] == "+"))


def main() -> int:
    args = _arguments()
    torch.set_num_threads(1)
    if args.mutants:
        return _search_all(args.record)
    if args.until_found:
        return _search(args)
    features, modes = chosen_features(args.features), parse_modes(args.modes or "eager")
    prepare(modes)
    seeds = range(args.seed, args.seed + (args.programs or 100))
    if args.print:
        print("\n\n".join(generate(seed, features).text() for seed in seeds))
        return 0
    if args.run:
        return max(int(show(str(args.run), mode.name)) for mode in modes)
    if args.child:
        tell_as_child(seeds, modes, features)
        return 0
    tally = _campaign(args, seeds, modes, features)
    _tell(tally)
    if args.record:
        command = "python -m tests.fuzz " + " ".join(sys.argv[1:])
        record(args.record, tally, [m.name for m in modes], command)
    return 1 if tally.failures else 0


def _search_all(page: Path | None) -> int:
    """Every mutant, but for those of Triton's kernels where there is no Triton."""
    has_triton = importlib.util.find_spec("triton") is not None
    chosen = [m for m in MUTANTS.values() if has_triton or "triton" not in m.modes]
    prepare([mode for mutant in chosen for mode in parse_modes(mutant.modes)])
    results = record_searches(page, [mutant.name for mutant in chosen])
    return 0 if all(result.found for _, result in results) else 1


def _search(args: argparse.Namespace) -> int:
    chosen = MUTANTS[args.until_found]
    modes = parse_modes(args.modes or chosen.modes)
    features = chosen_features(args.features) if args.features else chosen.features
    prepare(modes)
    seeds = range(args.seed, args.seed + (args.programs or chosen.patience))
    result = search(args.until_found, seeds, modes, features)
    told = f"found: {result.found}" if result.found else "not found"
    print(f"{args.until_found}: {told}, after {result.programs} programs")
    return 0 if result.found else 1


def _campaign(args: argparse.Namespace, seeds: range, modes: list, features: tuple) -> Tally:
    tally = Tally(programs=len(seeds))
    run = run_isolated if args.isolate else run_here
    firsts = []
    for found in timed(run(seeds, modes, features), tally):
        if tally.add(found):
            firsts.append(found)
            print(f"seed {found.seed}, {found.mode}: {found.outcome.kind}", flush=True)
            print(f"  {found.outcome.message[:500]}", flush=True)
    for found in firsts[: args.shrink_limit] if args.shrink else []:
        _show_small(found, args, features)
    return tally


def _show_small(found: Found, args: argparse.Namespace, features: tuple[str, ...]) -> None:
    """In a child if programs may take their process down."""
    if not args.isolate:
        print(printed(shrunk(found, features, args.shrink_seconds), found), flush=True)
        return
    arguments = ["--seed", str(found.seed), "--programs", "1", "--modes", found.mode, "--shrink"]
    arguments += ["--features", ",".join(features), "--shrink-seconds", str(args.shrink_seconds)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", __package__, *arguments],
            capture_output=True,
            text=True,
            timeout=args.shrink_seconds + 300,
        )
        print(done.stdout, flush=True)
    except subprocess.TimeoutExpired:
        print(f"seed {found.seed}: hangs while it shrinks", flush=True)


def _tell(tally: Tally) -> None:
    counts = ", ".join(f"{n} {status}" for status, n in tally.statuses.most_common())
    print(f"{tally.programs} programs in {tally.seconds:.0f} s: {counts}")
    for kernel, n in tally.kernels.most_common():
        print(f"  {n:4} programs with a {kernel}")
    for reason, n in tally.loops.most_common():
        print(f"  {n:4} loops: {reason}")
    clusters: dict[str, list[Found]] = {}
    for found in tally.failures:
        clusters.setdefault(found.cluster, []).append(found)
    for cluster, members in sorted(clusters.items(), key=lambda item: -len(item[1])):
        seeds = ", ".join(str(f.seed) for f in members[:8])
        print(f"  {len(members):4} {cluster} (seeds {seeds}; {members[0].mode})")


if __name__ == "__main__":
    sys.exit(main())
