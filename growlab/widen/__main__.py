"""`python -m growlab.widen FOLDER --width 1.5 --depth 2 -o OUT`: a saved model past its declared size.

FOLDER is what `save_pretrained` of transformers wrote; OUT is loaded by `from_pretrained` and computes the same. Exit
code 2: the model cannot be read, or cannot be widened so.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from growlab.errors import UserError
from growlab.widen.folder import widen_folder
from growlab.widen.sizes import PARTS
from growlab.widen.weights import METHODS


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="growlab widen",
        description=__doc__,
        epilog="Example: growlab widen ./my_model --width 1.5 --depth 2 -o wider",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="OUT", help="a new folder")
    parser.add_argument("--width", type=float, default=1.0, help="factor on stream, heads and hidden layers")
    parser.add_argument("--depth", type=float, default=1.0, help="factor on the number of layers")
    parser.add_argument(
        "--parts", default=",".join(PARTS), help="what becomes wider, with commas: stream, heads, mlp"
    )
    parser.add_argument(
        "--method", default="pairs", help=f"for heads and hidden layers: {' or '.join(METHODS)}"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    try:
        if args.width == args.depth == 1:
            raise UserError("nothing to do: give --width, --depth or both.")
        receipt = widen_folder(
            args.folder, args.out, args.width, args.depth, args.method, args.parts.split(","), args.seed
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{args.out}: {receipt['class']} of {receipt['num_params']:,} parameters, from "
        f"{receipt['num_params_before']:,}; relative change of its output {receipt['relative_error_float64']:.0e} "
        "(float64)"
    )
    for name, size in receipt["sizes"].items():
        print(f"  {name}: {size['before']} to {size['after']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
