"""`growlab prune FOLDER -o OUT --keep 0.5 --parts heads,mlp`: remove whole heads and channels from a saved model.

FOLDER was written by `save_pretrained` of transformers. OUT is loaded by `from_pretrained`, and has the outputs of
FOLDER with the removed heads and channels masked. Exit code 2: the model cannot be read, or cannot be pruned exactly.
"""

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from growlab.base.command_parser import CommandParser, amount, command
from growlab.base.errors import UserError
from growlab.grower.prune import Score, prune
from growlab.growth.outputs import evaluate
from growlab.growth.parity import relative_error
from growlab.inspect.small_models import FirstOutput, inputs_of
from growlab.widen.checkpoint import loaded
from growlab.widen.folder import check_out, copy_others, load, num_params, report, write_receipt
from growlab.widen.sizes import changed, resized
from growlab.widen.skeletons import skeleton
from growlab.widths import trace

#: File name of the receipt in the output folder.
RECEIPT = "growlab_pruning.json"
# Relative difference of outputs in float32 up to which they count as equal.
_EXACT = 1e-4


def prune_folder(
    folder: Path, out: Path, keep: float, parts: Collection[str] = ("heads", "mlp"), score: Score = "l1", seed: int = 0
) -> dict[str, Any]:
    """Write a narrower model with the outputs of a saved one whose removed channels are masked.

    Args:
        folder: folder written by `save_pretrained`.
        out: new folder, which `from_pretrained` loads.
        keep: fraction of each of `parts` that is kept.
        parts: any of "heads", "mlp" (hidden layers) and "stream" (the residual stream).
        score: ranking of heads and channels, "l1" or "random".
        seed: seed of random scores.

    Returns:
        The receipt, with the kept indices of each width group.

    Raises:
        UserError: the folder contains no loadable model, or the model cannot be pruned exactly in this way.
    """
    check_out(folder, out)
    if not 0 < keep < 1:
        raise UserError(f"--keep {keep:g} must be above 0 and below 1.")
    kind, config = load(folder)
    target_config = resized(config, keep, parts)
    model, target = loaded(folder, kind), skeleton(kind, target_config)
    num_params_before = num_params(model)
    inputs = inputs_of(model)
    network, probe = FirstOutput(model, list(inputs)), tuple(inputs.values())
    graph = trace(network, probe)
    shapes = {f"network.{name}": tuple(tensor.shape) for name, tensor in target.state_dict(keep_vars=True).items()}
    widths = {**graph.full_widths, **graph.widths_of(shapes)}
    if wrong := [name for name in graph.axes if name in shapes and graph.shape(name, widths) != shapes[name]]:
        raise UserError(
            f"{kind.__name__} has no width groups for {', '.join(parts)} of its configuration: "
            f"{wrong[0].removeprefix('network.')} cannot be narrowed; give other --parts."
        )
    kept = prune(network, graph, widths, score, example=probe, seed=seed)
    _check(model, kind, target_config, network, probe)
    model.config = target_config
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    copy_others(folder, out)
    receipt = {
        "from": folder.name,
        "class": kind.__name__,
        "keep": keep,
        "parts": list(parts),
        "score": score,
        "seed": seed,
        "sizes": {name: {"before": a, "after": b} for name, a, b in changed(config, target_config)},
        "num_params_before": num_params_before,
        "num_params": num_params(model),
        "kept": {
            group.removeprefix("network."): channels.tolist()
            for group, channels in kept.items()
            if len(channels) < graph.full_widths[group]
        },
    }
    return write_receipt(out / RECEIPT, receipt)


def _check(model: nn.Module, kind: Any, config: Any, network: FirstOutput, probe: Any) -> None:
    """Raise a UserError unless a new model of the smaller configuration computes the same as the pruned model."""
    fresh = kind._from_config(config, dtype=next(model.parameters()).dtype)
    fresh.load_state_dict(model.state_dict())
    expected = evaluate(network, probe)
    error = relative_error(expected, evaluate(FirstOutput(fresh, network.input_names), probe))
    if error > _EXACT:
        raise UserError(
            f"the output of {kind.__name__} with the smaller configuration would differ from the pruned model's by "
            f"{error:.0e}, because its code computes numbers from these sizes; give other --parts."
        )


@command
def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    parser = CommandParser(
        prog="growlab prune",
        description=__doc__,
        epilog="Example: growlab prune ./my_llama --keep 0.75 -o smaller",
    )
    parser.add_argument("model", type=Path, metavar="FOLDER", help="a saved model of transformers")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="OUT", help="a new folder")
    parser.add_argument("--keep", type=amount, required=True, metavar="SHARE", help="fraction to keep, below 1")
    parser.add_argument("--parts", default="heads,mlp", help="with commas: heads, mlp, stream")
    parser.add_argument("--score", choices=("l1", "random"), default="l1", help="how channels are ranked")
    parser.add_argument("--seed", type=int, default=0, help="of random scores")
    args = parser.parse_args(arguments)
    receipt = prune_folder(args.model, args.out, args.keep, args.parts.split(","), args.score, args.seed)
    report(args.out, receipt)
    return 0


if __name__ == "__main__":
    sys.exit(main())
