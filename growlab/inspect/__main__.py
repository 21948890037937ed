"""`python -m growlab widths MODEL`: report which parts of a network can grow, which cannot and why, and how exactly.

MODEL is `growlab/NAME`, `torchvision/NAME`, `timm/NAME`, `transformers/MODEL_TYPE` (a small network made from a
configuration), or `package.module:factory` with `--input-shape C,H,W`.
Exit code 1: a network was refused or did not grow exactly; 2: there is no such network.
A matrix also takes `torchvision/*` and `timm/*` (the smallest network of each family) and `transformers/*`.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from growlab.base.command_parser import CommandParser, amount, count, sizes
from growlab.base.errors import UserError
from growlab.inspect import METHODS, USUAL, Report, examine, expand, matrix

_SHOWN_NAMES = 3


def describe(report: Report) -> str:
    """Format a report as text."""
    if report.error is not None and not report.full_params:
        return f"{report.model}: refused\n  {report.error}"
    number = f"{len(report.groups)} width group{'' if len(report.groups) == 1 else 's'}"
    lines = [
        f"{report.model}: {number} (sets of channels that grow together), traced in {report.trace_sec:.1f} s",
        f"  parameters  {report.full_params:,}, of which {report.growing_share:.0%} lie in tensors that grow; "
        f"the seed has {report.seed_params:,}",
        f"  FLOPs       {report.full_flops:,} {'a sample forward' if report.samples > 1 else 'forward'}; "
        f"the seed needs {report.seed_flops:,}",
    ]
    if report.groups:
        lines.append("  grows       (layer that makes the channels: full width)")
        named = [(name, _width(width, report.steps.get(name, 1))) for name, width in report.groups.items()]
        lines += [f"    {names}: {width}" for names, width in _alike(named)]
    if report.last:
        named = [
            (name, "" if free else " (something behind it fixes its scale)")
            for name, free in report.last.items()
        ]
        lines.append("  last        affine layers: " + ", ".join(f"{n}{why}" for n, why in _alike(named)))
    if report.tied:
        lines.append(
            f"  last        tables of embeddings: {', '.join(report.tied)} (neither rescaled nor given an output "
            "layer's rate)"
        )
    if report.fixed:
        lines.append("  stays       at full width, because")
        lines += [f"    {names}: {reason}" for names, reason in _alike(report.fixed.items())]
    for name, found in report.parts.items():
        lines += [
            f"  {title:<11} {line}" for title, line in zip([name, *[""] * len(found)], found, strict=False)
        ]
    if report.parity:
        shapes = ", ".join("x".join(map(str, shape)) for shape in report.probe)
        lines.append(
            f"  parity      largest relative change of the output at a growth event (float64, input {shapes}),"
        )
        lines.append(
            "              and after loading the full-width state_dict into the network as it is built"
        )
        lines += [
            f"    {method}: {errors['eval']:.1e} in eval mode, {errors['train']:.1e} in train mode, "
            f"{errors['loaded']:.1e} loaded{'' if METHODS[method].preserves else ' (promises nothing)'}"
            for method, errors in report.parity.items()
        ]
    if report.error is not None:
        lines.append(f"  failed      {report.error}")
    return "\n".join(lines)


def _width(width: int, step: int) -> str:
    """Format the number of channels, with the number per head or group where they come in such units."""
    return str(width) if step == 1 else f"{width * step} = {width} x {step} (heads or groups of channels)"


def _alike(named: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Merge names that differ only in numbers and have the same content: `layer1.*.conv2 (3 times)`."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, content in named:
        alike.setdefault((re.sub(r"\d+(?=\.|#|$)", "*", name), content), []).append(name)
    lines = []
    for (pattern, content), names in alike.items():
        shown = ", ".join(names) if len(names) <= _SHOWN_NAMES else f"{pattern} ({len(names)} times)"
        lines.append((shown, content))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = CommandParser(
        prog="growlab widths",
        description=__doc__,
        epilog="Example: growlab widths my_package.my_module:factory --input-shape 3,32,32",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument(
        "--input-shape", type=sizes, metavar="C,H,W", help="of one sample that the network takes"
    )
    parser.add_argument(
        "--keep-full",
        action="extend",
        nargs="+",
        default=[],
        metavar="OP",
        help="operations growth need not pass",
    )
    parser.add_argument(
        "--methods", default=",".join(USUAL), help=f"growth methods, with commas: {', '.join(METHODS)}"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--matrix",
        type=Path,
        metavar="FILE",
        help="examine every model apart and write FILE.md and FILE.json; goes on where they end",
    )
    parser.add_argument(
        "--time-limit", type=amount, metavar="SEC", help="CPU seconds for each model of a matrix (60)"
    )
    parser.add_argument("--memory-limit", type=amount, metavar="GB", help="for each model of a matrix")
    parser.add_argument("--jobs", type=count, metavar="N", help="processes of a matrix (1)")
    try:
        args = parser.parse_args(arguments)
        methods = args.methods.split(",")
        if unknown := set(methods) - set(METHODS):
            raise UserError(f"no growth method {', '.join(unknown)}; there are {', '.join(METHODS)}.")
        if args.matrix is not None:
            return _matrix(args, methods)
        if given := [f"--{name}-limit" for name in ("time", "memory") if vars(args)[f"{name}_limit"]]:
            raise UserError(f"{given[0]} is for the models of a --matrix FILE: leave it out.")
        if args.jobs is not None:
            raise UserError("--jobs is for the models of a --matrix FILE: leave it out.")
        reports = []
        for name in args.models:
            if sys.stderr.isatty():
                told = f"tracing {name}, then growing it by {', '.join(methods)} in float64 ..."
                print(told, file=sys.stderr, flush=True)
            reports.append(examine(name, args.input_shape, 3, args.keep_full, methods))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for report in reports:
        print(json.dumps(asdict(report)) if args.json else describe(report))
    return 1 if any(report.error is not None for report in reports) else 0


def _matrix(args: argparse.Namespace, methods: Sequence[str]) -> int:
    if args.json or args.keep_full:
        raise UserError(
            "--matrix examines every model alike and writes both of its files: leave --json and --keep-full out."
        )
    limits = (args.time_limit or 60.0, args.memory_limit, args.jobs or 1)
    matrix(expand(args.models), args.matrix, methods, args.input_shape, *limits)
    return 0


if __name__ == "__main__":
    sys.exit(main())
