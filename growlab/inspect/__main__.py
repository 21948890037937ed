"""`python -m growlab widths MODEL`: report which parts of a network can grow and how exactly, which cannot, and why.

MODEL is `growlab/NAME`, `torchvision/NAME`, `timm/NAME`, `transformers/MODEL_TYPE` (a small network made from a
configuration), or `package.module:factory` with `--input-shape C,H,W`.
Exit code 1: a network was refused or did not grow exactly; 2: there is no such network.
A matrix also takes `torchvision/*`, `timm/*` (the smallest network of each family) and `transformers/*`.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from growlab.base.command_parser import CommandParser, amount, command, count, in_columns, sizes
from growlab.base.errors import UserError
from growlab.inspect import METHODS, USUAL, Report, examine, expand, matrix
from growlab.widths.groups import count_groups, report_lines


def describe(report: Report) -> str:
    """Format a report as text."""
    if report.error is not None and not report.full_params:
        return f"{report.model}: refused\n  {report.error}"
    lines = [
        f"{report.model}: {count_groups(report.groups)}, traced in {report.trace_sec:.1f} s",
        f"  parameters  {report.full_params:,}, of which {report.growing_share:.0%} are in tensors that grow; "
        f"the seed has {report.seed_params:,}",
        f"  FLOPs       {report.full_flops:,} {'a sample forward' if report.samples > 1 else 'forward'}; "
        f"the seed needs {report.seed_flops:,}",
        *report_lines(report.groups, report.steps, report.last, report.tied, report.fixed),
    ]
    for name, notes in report.parts.items():
        lines += [f"  {title:<11} {line}" for title, line in zip([name, *[""] * len(notes)], notes, strict=False)]
    if report.parity:
        shapes = ", ".join("x".join(map(str, shape)) for shape in report.probe)
        lines += [
            f"  parity      largest relative change of the output at a growth event (float64, input {shapes}),",
            "              and after loading the full-width state_dict into the network as it is built",
        ]
        lines += [
            f"    {method}: {errors['eval']:.1e} in eval mode, {errors['train']:.1e} in train mode, "
            f"{errors['loaded']:.1e} loaded{'' if METHODS[method].preserves else ' (promises nothing)'}"
            for method, errors in report.parity.items()
        ]
    if report.error is not None:
        lines.append(f"  failed      {report.error}")
    return "\n".join(lines)


@command
def main(arguments: Sequence[str]) -> int:
    """Report on the models of a command line; return 1 if any does not grow exactly."""
    parser = CommandParser(
        prog="growlab widths",
        description=__doc__,
        epilog="Example: growlab widths my_package.my_module:factory --input-shape 3,32,32",
    )
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL")
    add("--input-shape", type=sizes, metavar="C,H,W", help="shape of one sample")
    keep_full = "operations without a channel rule; their input channels keep full width"
    add("--keep-full", action="extend", nargs="+", default=[], metavar="OP", help=keep_full)
    add("--methods", default=",".join(USUAL), help=f"growth methods, with commas: {', '.join(METHODS)}")
    add("--json", action="store_true", help="print the report as JSON")
    matrix_help = "examine each model in its own process and write FILE.md and FILE.json; resumes from these files"
    add("--matrix", type=Path, metavar="FILE", help=matrix_help)
    add("--time-limit", type=amount, default=60.0, metavar="SEC", help="CPU seconds for each model of a matrix (60)")
    add("--memory-limit", type=amount, metavar="GB", help="memory limit for each model of a matrix")
    add("--jobs", type=count, default=1, metavar="N", help="processes of a matrix (1)")
    args = parser.parse_args(arguments)
    methods = args.methods.split(",")
    if unknown := set(methods) - set(METHODS):
        raise UserError(f"no growth method {', '.join(unknown)}; there are {', '.join(METHODS)}.")
    if args.matrix is not None:
        if args.json or args.keep_full:
            raise UserError("--matrix does not support --json, as it writes both files, or --keep-full.")
        limits = (args.time_limit, args.memory_limit, args.jobs)
        matrix(expand(args.models), args.matrix, methods, args.input_shape, *limits)
        return 0
    reports = []
    for name in args.models:
        if sys.stderr.isatty():
            text = f"tracing {name}, then growing it by {', '.join(methods)} in float64 ..."
            print(text, file=sys.stderr, flush=True)
        reports.append(examine(name, args.input_shape, 3, args.keep_full, methods))
    for report in reports:
        print(json.dumps(asdict(report)) if args.json else in_columns(describe(report)))
    return 1 if any(report.error is not None for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
