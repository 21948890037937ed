"""`growlab upcycle FOLDER -o OUT --experts 8 --top-k 2`: turn a dense language model into a mixture of experts.

FOLDER was written by `save_pretrained` of transformers. Llama and Mistral become Mixtral; Qwen2 and Qwen3 become
Qwen2-MoE and Qwen3-MoE. Every expert starts as a copy of the dense MLP, and the weights of the chosen experts sum to 1,
so OUT computes the same as FOLDER (Komatsuzaki et al. 2023, sparse upcycling). `--more-experts 2` multiplies the
experts of a mixture, and the experts per token by the same number. Exit code 2: the model cannot be read, or cannot be
changed in this way.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.command_parser import CommandParser, amount, command, count
from growlab.base.errors import UserError
from growlab.grower.rows import EXACT, copies, multiplied, number_of_experts
from growlab.growth.method import generator
from growlab.growth.parity import relative_error
from growlab.inspect.small_models import FirstOutput, inputs_of
from growlab.widen.checkpoint import Checkpoint, first_names, read_folder
from growlab.widen.folder import RECEIPT, check_out, load, num_params, report, write_model, write_receipt
from growlab.widen.skeletons import output_of, skeleton
from growlab.widen.weights import blocks_of

# Model type of a dense model -> configuration and model class of its mixture.
_FAMILIES = {
    "llama": ("MixtralConfig", "MixtralForCausalLM"),
    "mistral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen2": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
}
_EXPERTS = ("num_local_experts", "num_experts")
# Entries of a configuration that name the model itself.
_OWN = ("model_type", "architectures", "transformers_version", "_name_or_path")

#: Returns a tensor of the original model by its name.
Read = Callable[[str], Tensor]


def upcycle(model: Any, experts: int = 8, top_k: int = 2, router_std: float = 0.02, seed: int = 0) -> Any:
    """Return a mixture of experts that computes the same as a dense model of transformers, up to 1e-6.

    Every expert is a copy of the dense MLP; routers are drawn at random. A shared expert (Qwen2-MoE) is as wide as the
    dense MLP, and its output starts at zero.

    Args:
        model: `LlamaForCausalLM`, `MistralForCausalLM`, `Qwen2ForCausalLM` or `Qwen3ForCausalLM`; not changed.
        experts: number of experts in each layer.
        top_k: number of experts per token.
        router_std: standard deviation of the routers' weights.
        seed: seed of all random draws.

    Raises:
        UserError: there is no mixture of experts of this family, or it does not support a setting of the model.

    Source: Komatsuzaki et al. 2023, "Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints".
    """
    kind, config = mixture_of(model.config, experts, top_k)
    return _in_memory(model, kind, config, partial(_expert, config=config, std=router_std, seed=seed))


def more_experts(model: Any, by: int = 2, noise: float = 0.1, seed: int = 0) -> Any:
    """Return a mixture with `by` times as many experts, and experts per token, that has the same outputs.

    Copies of an expert get the same routing weight. Noise that sums to zero over the copies is added to their last
    layers, so that the outputs stay the same and training separates the copies.

    Args:
        model: a mixture of experts of transformers, such as `MixtralForCausalLM`; not changed.
        by: number of copies of each expert.
        noise: standard deviation of the noise, relative to that of the weights.
        seed: seed of the noise.

    Raises:
        UserError: growlab does not know the model as a mixture of experts.
    """
    config = multiplied(model.config, by, noise)
    return _in_memory(model, type(model), config, partial(_copied, by=by, noise=noise, seed=seed))


def mixture_of(config: Any, experts: int, top_k: int) -> tuple[Any, Any]:
    """Return the class and configuration of a dense model's mixture of experts; raise if none has the same outputs."""
    transformers = importlib.import_module("transformers")
    if config.model_type not in _FAMILIES:
        raise UserError(
            f"there is no mixture of experts of {config.model_type}; there are those of {', '.join(_FAMILIES)}."
        )
    if not 1 <= top_k <= experts:
        raise UserError(f"--top-k {top_k} must be from 1 to the number of experts, {experts}.")
    names = _FAMILIES[config.model_type]
    dense = {name: value for name, value in config.to_dict().items() if name not in _OWN}
    if config.model_type in ("llama", "mistral"):
        if biases := [name for name in ("attention_bias", "mlp_bias") if dense.get(name)]:
            raise UserError(f"Mixtral has no biases, but this model has {biases[0]}=True.")
        # Llama has no sliding window.
        dense.setdefault("sliding_window", None)
    settings = {
        **dense,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": config.intermediate_size,
        "shared_expert_intermediate_size": config.intermediate_size,
        "router_jitter_noise": 0.0,
        **dict.fromkeys(_EXPERTS, experts),
    }
    kind, model_class = (getattr(transformers, name) for name in names)
    default = kind()
    # Models read `head_dim` even if their configuration class does not declare it.
    supported = {name: value for name, value in settings.items() if hasattr(default, name) or name == "head_dim"}
    return model_class, kind(**supported)


def _expert(name: str, read: Read, shape: tuple[int, ...], config: Any, std: float, seed: int) -> Tensor:
    """Compute a tensor of a mixture from the dense model's tensors; experts are views of one tensor."""
    path, _, parameter = name.rpartition(".")
    if path.endswith("mlp.experts"):
        mlp = path.removesuffix(".experts")
        if parameter == "gate_up_proj":
            dense = torch.cat([read(f"{mlp}.gate_proj.weight"), read(f"{mlp}.up_proj.weight")])
        else:
            dense = read(f"{mlp}.down_proj.weight")
        return dense.expand(shape)
    like = read(name.partition("mlp.")[0] + "mlp.down_proj.weight") if ".mlp." in name else None
    if like is None:
        return read(name)
    if name.endswith("shared_expert.down_proj.weight"):
        return like.new_zeros(shape)
    std = std if path.endswith("mlp.gate") else config.initializer_range
    return (torch.randn(shape, generator=generator(seed, 0, name), dtype=torch.float64) * std).to(like.dtype)


def _copied(name: str, read: Read, shape: tuple[int, ...], by: int, noise: float, seed: int) -> Tensor:
    """Compute a tensor of a mixture with more experts; copies follow their original."""
    old = read(name)
    return old if old.shape == shape else copies(name, old, by, noise, seed)


def _in_memory(model: Any, kind: Any, config: Any, make: Any) -> Any:
    old, first = model.state_dict(), next(model.parameters())
    mixture = kind._from_config(config, dtype=first.dtype).train(model.training)
    with torch.no_grad():
        for name, parameter in mixture.named_parameters():
            parameter.copy_(_checked(name, make(name, old.__getitem__, tuple(parameter.shape)), parameter))
    return mixture.to(first.device)


def _checked(name: str, tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor if it has the shape that the mixture needs."""
    if tensor.shape != like.shape:
        raise UserError(f"{name} would be {list(like.shape)} in a mixture of experts but is {list(tensor.shape)}.")
    return tensor


def upcycle_folder(
    folder: Path,
    out: Path,
    experts: int = 8,
    top_k: int = 2,
    by: int | None = None,
    router_std: float = 0.02,
    noise: float = 0.1,
    seed: int = 0,
) -> dict[str, Any]:
    """Write the mixture of experts of a saved dense model, or multiply the experts of a saved mixture.

    Tensors are read, computed and written one at a time, also to check that both models compute the same.

    Args:
        folder: folder of `save_pretrained`.
        out: a new folder, which `from_pretrained` loads.
        experts: number of experts of a dense model's mixture.
        top_k: number of experts per token.
        by: factor on the number of experts of a saved mixture; None: `folder` is a dense model.
        router_std: standard deviation of new routers' weights.
        noise: relative standard deviation of the noise between copies of an expert.
        seed: seed of all random draws.

    Returns:
        The receipt. It has the number of tokens per expert of each layer in the check.

    Raises:
        UserError: the folder contains no such model, or outputs would change by more than 1e-6.
    """
    check_out(folder, out)
    kind, config = load(folder)
    if by is None:
        target_kind, target_config = mixture_of(config, experts, top_k)
        make: Any = partial(_expert, config=target_config, std=router_std, seed=seed)
    else:
        target_kind, target_config = kind, multiplied(config, by, noise)
        make = partial(_copied, by=by, noise=noise, seed=seed)
    source, target = skeleton(kind, config), skeleton(target_kind, target_config)
    saved = Checkpoint(folder, read_folder(folder), source)
    state = target.state_dict(keep_vars=True)

    def tensor(name: str) -> Tensor:
        return _checked(name, make(name, saved, tuple(state[name].shape)), state[name])

    error, tokens = _compared(source, saved, target, tensor)
    if error > EXACT:
        raise UserError(
            f"{target_kind.__name__} does not compute the same as {kind.__name__}: its output changes by {error:.0e}."
        )
    target_config.architectures = [target_kind.__name__]
    # New tensors have the dtype of the first saved tensor.
    default = next(iter(saved.dtypes.values()))

    def dtype(name: str) -> torch.dtype:
        return saved.dtypes.get(name, default)

    write_model(folder, out, target, target_config, saved.shard_bytes, lambda name: tensor(name).to(dtype(name)), dtype)
    receipt = {
        "from": folder.name,
        "model_type": target_config.model_type,
        "class": target_kind.__name__,
        "experts": number_of_experts(target_config),
        "experts_per_token": target_config.num_experts_per_tok,
        "more_experts": by,
        "router_std": router_std if by is None else None,
        "noise": None if by is None else noise,
        "seed": seed,
        "num_params_before": num_params(source),
        "num_params": num_params(target),
        "relative_error_float64": error,
        "tokens_per_expert": tokens,
    }
    return write_receipt(out / RECEIPT, receipt)


def _compared(
    source: nn.Module, saved: Checkpoint, target: nn.Module, tensor: Read
) -> tuple[float, dict[str, list[int]]]:
    """Compute the relative change of the output in float64, and the tokens per expert of each layer."""
    inputs = inputs_of(source)
    probe = tuple(inputs.values())
    shapes = {name: tuple(t.shape) for name, t in source.state_dict(keep_vars=True).items()}
    old = {name: name for name in first_names(source) if name in saved}
    expected, _ = output_of(
        FirstOutput(source, list(inputs)), probe, old, lambda name: blocks_of(partial(saved, name), shapes[name])
    )
    tokens: dict[str, list[int]] = {}
    names = {name: first for name, first in first_names(target).items() if name in dict(target.named_parameters())}
    with ExitStack() as hooks:
        for path, module in target.named_modules():
            if path.endswith("mlp.gate"):
                hooks.enter_context(module.register_forward_hook(partial(_count, tokens, path)))
        output, _ = output_of(FirstOutput(target, list(inputs)), probe, names, lambda name: iter((tensor(name),)))
    return relative_error(expected, output), tokens


def _count(tokens: dict[str, list[int]], path: str, module: nn.Module, inputs: Any, output: Any) -> None:
    logits, _, chosen = output
    tokens[path.removesuffix(".mlp.gate")] = torch.bincount(chosen.flatten(), minlength=logits.shape[-1]).tolist()


@command
def main(arguments: Sequence[str]) -> int:
    """Run the command line; returns the exit code."""
    parser = CommandParser(
        prog="growlab upcycle",
        description=__doc__,
        epilog="Example: growlab upcycle ./my_llama -o my_mixtral --experts 8 --top-k 2",
    )
    parser.add_argument("model", type=Path, metavar="FOLDER", help="a saved model of transformers")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="OUT", help="a new folder")
    parser.add_argument("--experts", type=count, default=8, help="number of experts of a dense model's mixture")
    parser.add_argument("--top-k", type=count, default=2, help="number of experts per token")
    parser.add_argument("--more-experts", type=count, metavar="K", help="K copies of each expert of a mixture")
    parser.add_argument("--router-std", type=amount, default=0.02, help="standard deviation of new routers")
    parser.add_argument(
        "--noise", type=partial(amount, zero=True), default=0.1, help="between copies of an expert, relative"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    receipt = upcycle_folder(
        *(args.model, args.out, args.experts, args.top_k, args.more_experts),
        *(args.router_std, args.noise, args.seed),
    )
    report(args.out, receipt, f"{receipt['experts']} experts, {receipt['experts_per_token']} per token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
