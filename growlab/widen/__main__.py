"""`python -m growlab widen FOLDER --width 1.5 --depth 2 -o OUT`: enlarge a saved model without changing its outputs.

FOLDER was written by `save_pretrained` of transformers; OUT is loaded by `from_pretrained` and computes the same. A
name and a state_dict's file, `torchvision/resnet18 weights.pt` or `timm/NAME weights.safetensors`, are widened too; OUT
is then loaded by `growlab.widen.load_widened`. With `--dcp CHECKPOINT` a checkpoint of torch.distributed.checkpoint is
widened with its optimizer's moments, by whole factors; OUT is loaded by its `load`. Exit code 2: the model cannot be
read, or cannot be widened so.
"""

import argparse
import contextlib
import ctypes
import sys
from collections.abc import Sequence
from pathlib import Path

from growlab.base.command_parser import CommandParser, amount, command, sizes
from growlab.base.errors import UserError
from growlab.widen.folder import num_params, report, widen_folder
from growlab.widen.sizes import PARTS
from growlab.widen.vision import is_named, widen_weights
from growlab.widen.weights import DEFAULT, METHODS, NOISE_STD, method_of


@command
def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    parser = CommandParser(
        prog="growlab widen",
        description=__doc__,
        epilog="Example: growlab widen ./my_model --width 1.5 --depth 2 -o wider",
    )
    parser.add_argument("model", metavar="FOLDER", help="or torchvision/NAME or timm/NAME with WEIGHTS")
    parser.add_argument("weights", nargs="?", type=Path, metavar="WEIGHTS", help="a state_dict's file")
    parser.add_argument(
        "--dcp",
        type=Path,
        metavar="CHECKPOINT",
        help="widen this folder of torch.distributed.checkpoint, with its optimizer; FOLDER has the config.json",
    )
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="OUT", help="a new folder")
    parser.add_argument("--width", type=amount, default=1.0, help="factor on stream, heads and hidden layers")
    parser.add_argument("--depth", type=amount, default=1.0, help="factor on the number of layers")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to widen, with commas: stream, heads, mlp")
    parser.add_argument(
        "--method", default=DEFAULT, help=f"for heads and hidden layers: {', '.join(METHODS)} (%(default)s)"
    )
    parser.add_argument(
        "--noise", type=float, default=NOISE_STD, help="noise that separates copies, relative (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--input-shape", type=sizes, default=[3, 224, 224], metavar="C,H,W", help="of images, for torchvision and timm"
    )
    _give_back_freed_memory()
    args = parser.parse_args(arguments)
    if args.width == args.depth == 1:
        raise UserError("nothing to do: give --width, --depth or both.")
    if args.dcp is not None:
        return _widen_dcp(args)
    if is_named(args.model):
        return _widen_named(args)
    if args.weights is not None:
        raise UserError(
            f"{args.weights} is given as WEIGHTS, but {args.model} is no torchvision/NAME or timm/NAME: a folder takes "
            "no WEIGHTS."
        )
    settings = (args.width, args.depth, args.method, args.parts.split(","), args.seed, args.noise)
    report(args.out, widen_folder(Path(args.model), args.out, *settings))
    return 0


def _give_back_freed_memory() -> None:
    """Make glibc return the memory of each large tensor when it is freed; otherwise peak memory would double.

    The threshold is above the size of blocks (4 MiB), for which new pages would cost a tenth of the time.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(-3, 1 << 23)  # M_MMAP_THRESHOLD


def _widen_dcp(args: argparse.Namespace) -> int:
    # Importing torch.distributed.checkpoint takes a second.
    from growlab.widen.distributed import widen_distributed

    if args.depth != 1:
        raise UserError("--dcp takes --width alone: a checkpoint has no optimizer state for new layers.")
    method = method_of(args.method, args.noise)
    model = widen_distributed(
        Path(args.model), args.dcp, args.out, args.width, method, args.parts.split(","), args.seed
    )
    print(f"{args.out}: {type(model).__name__} of {num_params(model):,} parameters")
    return 0


def _widen_named(args: argparse.Namespace) -> int:
    if args.weights is None:
        raise UserError(f"give the file of {args.model}'s state_dict after its name.")
    if args.depth != 1 or args.parts != ",".join(PARTS):
        raise UserError("--depth and --parts are for folders of transformers; give --width alone.")
    if len(args.input_shape) != 3:
        raise UserError("--input-shape takes three numbers: C,H,W.")
    receipt = widen_weights(
        args.model, args.weights, args.out, args.width, args.method, args.seed, tuple(args.input_shape), args.noise
    )
    report(args.out, receipt, f"load it with growlab.widen.load_widened({str(args.out)!r})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
