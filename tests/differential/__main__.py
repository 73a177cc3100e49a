"""`python -m tests.differential`: random programs of the driver's calls, natively and under xMIG, compared byte for
byte with what they mean; a program that differs is shrunk and kept.

    python -m tests.differential --count 2000                                on two cpu devices
    python -m tests.differential --count 200 --disturb kill,move,suspend
    python -m tests.differential --kind cuda --devices 2 --native --under --count 10000 --processes 12
    python -m tests.differential --replay build/differential/seed-17.json

Its worth was tried with faults put into client and server by hand, programs until the first one saw it on one and on
two devices: copies on the device one byte short from 512 bytes on (1, 1), waits for events left out (1, 2), blocking
32-bit memsets in the per-thread stream (63, 300), launches of one executable graph not ordered (13, 3), changed nodes
of an executable graph not reported to the server (26, 11). Two in recoveries were reported by these themselves, as not
exact, in 300 programs with two dozen disturbances: every second chunk not restored, and page-locked memory read again.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.differential.batch import DISTURBANCES, Outcome, fails_again, run
from tests.differential.generator import FEATURES, generate
from tests.differential.program import Program
from tests.differential.runs import HERE, Difference, Place, Runs, compile_kernels
from tests.differential.shrink import shrink
from xmigd.demo.node import Node

TRIES = 8  # of a program that fails when it is disturbed


def main() -> int:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    bad = 0
    with contextlib.ExitStack() as stack:
        places = stack.enter_context(found_places(options))
        if options.replay is not None:
            return replay(options, places)
        for place, outcome in run(
            places, options.seed, options.count, options.devices, options.features, kinds=options.disturb,
            moves=moves(options), most=options.most,
        ):  # fmt: skip
            print(reported(place, outcome), flush=True)
            bad += len(outcome.differences) + outcome.inexact
            for number, found in enumerate(outcome.differences):
                keep(options, place, found, small=number == 0 and not options.no_shrink)
    return 1 if bad else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--count", type=int, default=200, help="programs")
    parser.add_argument("--devices", type=int, choices=(1, 2), default=1, help="devices of a program")
    parser.add_argument("--kind", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--native", action="store_true", help="without xMIG, on the machine's own driver")
    parser.add_argument("--under", action="store_true", help="under xMIG (what is done if nothing is reported)")
    parser.add_argument("--disturb", default="", help=f"what happens meanwhile, of {', '.join(DISTURBANCES)}")
    parser.add_argument("--without", default="", help=f"features to leave out, of {', '.join(sorted(FEATURES))}")
    parser.add_argument("--processes", type=int, default=1, help="that run programs at a time, of each kind")
    parser.add_argument("--most", type=int, default=5, help="differences after which it ends")
    parser.add_argument("--python", default=sys.executable, help="that runs the programs; it needs nothing but itself")
    parser.add_argument("--replay", type=Path, help="a kept program")
    parser.add_argument("--show", action="store_true", help="print the program of --seed, and do nothing")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/differential"), help="folder of what differs")
    options = parser.parse_args()
    options.disturb = words(parser, options.disturb, frozenset(DISTURBANCES))
    options.features = FEATURES - set(words(parser, options.without, FEATURES))
    if options.show:
        print(generate(options.seed, options.devices, options.features).text())
        sys.exit()
    return options


def words(parser: argparse.ArgumentParser, text: str, known: frozenset[str]) -> tuple[str, ...]:
    found = tuple(word for word in text.split(",") if word)
    if unknown := set(found) - known:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are: {', '.join(sorted(known))}")
    return found


@contextlib.contextmanager
def found_places(options: argparse.Namespace) -> Iterator[list[Place]]:
    """Natively, under a daemon of its own, or both."""
    under = options.under or not options.native
    with contextlib.ExitStack() as stack:
        kernels = HERE / "kernels.ptx"
        if options.kind == "cpu":
            kernels = compile_kernels(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="xmig-kernels-"))))
        common = {"python": options.python, "processes": options.processes}
        places = [Place(kernels, **common)] if options.native else []
        if under:
            # A process with several devices moves to as many others.
            count = options.devices * (2 if "move" in options.disturb else 1)
            names = ",".join(f"{options.kind}:{ordinal}" for ordinal in range(count))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="xmig-"))
            settings = (
                {"devices": names, "port": -1, "snapshot_cost": 0.5}
                if options.disturb
                else {"devices": names, "port": -1}
            )
            if options.kind == "cpu":
                settings["device_memory"] = 1 << 30
            node = stack.enter_context(Node(Path(folder), **settings))
            places.append(Place(kernels, node, moves(options)[0], **common))
        yield places


def moves(options: argparse.Namespace) -> tuple[str, str]:
    """The devices that a program has, and those that it moves to."""
    return tuple(  # type: ignore[return-value]
        f"{options.kind}:" + ",".join(str(first + i) for i in range(options.devices)) for first in (0, options.devices)
    )


def reported(place: Place, outcome: Outcome) -> str:
    where = "natively" if place.node is None else "under xMIG"
    disturbed = ", ".join(f"{number} × {kind}" for kind, number in outcome.disturbed.items() if number)
    return (
        f"{where}: {outcome.programs} programs in {outcome.seconds:.1f} s, {len(outcome.differences)} differences"
        + (f"; {disturbed}, {outcome.inexact} recoveries not exact" if disturbed else "")
    )


def keep(options: argparse.Namespace, place: Place, found: Difference, *, small: bool) -> None:
    """Tell of it, make it smaller, and write it down."""
    path = options.out / f"seed-{found.program.seed}.json"
    path.write_text(found.program.text())
    print(f"{found}\n  kept in {path}; {again(options, path)}", flush=True)
    if not small:
        return
    fails, end = fails_again(place, found, tries=TRIES if options.disturb else 1, kinds=options.disturb,
                             moves=moves(options))  # fmt: skip
    try:
        if not fails(found.program):
            print("  alone it does not fail", flush=True)
            return
        made = shrink(found.program, fails)
    finally:
        end()
    path = path.with_name(f"{path.stem}-small.json")
    path.write_text(made.text())
    print(f"  {len(made.ops)} calls are enough: {path}\n{made.text()}  {again(options, path)}", flush=True)


def again(options: argparse.Namespace, path: Path) -> str:
    """The command that runs it again."""
    chosen = [f"--kind {options.kind} --devices {options.devices}"]
    chosen += ["--native"] if options.native else []
    chosen += ["--under"] if options.under else []
    chosen += [f"--disturb {','.join(options.disturb)}"] if options.disturb else []
    return f"again: python -m tests.differential {' '.join(chosen)} --replay {path}"


def replay(options: argparse.Namespace, places: list[Place]) -> int:
    program, bad = Program.read(options.replay.read_text()), 0
    for place in places:
        if options.disturb:
            fails, end = fails_again(place, Difference(program, "read something else"), tries=TRIES,
                                     kinds=options.disturb, moves=moves(options))  # fmt: skip
            found = "it fails" if fails(program) else None
            end()
        else:
            with Runs(place) as runs:
                found = str(runs.one(program) or "") or None
        print(f"{'natively' if place.node is None else 'under xMIG'}: {found or 'no difference'}", flush=True)
        bad += found is not None
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
