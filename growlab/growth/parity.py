"""Parity: does the network compute after a growth event what it computed before?"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from growlab.widths import Norm

# Relative output error above which it cannot be rounding, by the parameters' precision. Ten times and more above
# what is seen (about 1e-6 in float32, rarely 1e-5 where running statistics are far off): a run must not stop
# over rounding, and a mistake in a rule shows as 1e-2 or worse.
ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
# The eps bound is first order in every norm; errors compound over the layers behind it.
_BOUND_SAFETY = 10.0


@dataclass(frozen=True)
class Outputs:
    """A network's outputs on the probe batch.

    Attributes:
        eval: in eval mode.
        train: in train mode, or None if the network cannot run so.
        variances: batch variance at the input of each batch normalisation in train mode, by module name.
    """

    eval: Tensor
    train: Tensor | None
    variances: Mapping[str, Tensor]


def observe(model: nn.Module, probe: Sequence[Tensor], norms: Sequence[Norm] = ()) -> Outputs:
    """Run the probe batch in eval and in train mode and leave no trace of it.

    Statistics, modes and random generators are put back; compiled modules run eagerly; reduced-precision
    matrix modes are off, so that the error measured is growth's and not the hardware's.

    Args:
        model: the network.
        probe: its positional inputs.
        norms: batch normalisations whose input variance is wanted.
    """
    modes = {module: module.training for module in model.modules()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    variances: dict[str, Tensor] = {}

    def record(name: str) -> object:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].detach()
            variances[name] = x.var([d for d in range(x.dim()) if d != 1], correction=0)

        return hook

    known = dict(model.named_modules())
    hooks = [
        known[norm.name].register_forward_pre_hook(record(norm.name)) for norm in norms if norm.name in known
    ]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.no_grad(), _full_precision(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(0)
            model.train()
            train = model(*probe)
            model.eval()
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
            evaluated = model(*probe)
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
    return Outputs(evaluated, train, variances)


def relative_error(before: Tensor, after: Tensor, factor: float = 1.0) -> float:
    """Largest difference between `factor * after` and `before`, relative to the largest entry before."""
    before, after = before.double(), after.double() * factor
    scale = before.abs().max().clamp(min=torch.finfo(torch.float64).tiny)
    return float((after - before).abs().max() / scale)


def eps_bound(norms: Sequence[Norm], scales: Mapping[str, float], variances: Mapping[str, Tensor]) -> float:
    """How far train mode may be off when the inputs of batch normalisations were rescaled but eps was not.

    A channel with batch variance v rescaled by c comes out multiplied by about
    1 + eps (1/c^2 - 1) / (2 v) (spec 01, Section 3); channels are averaged by the signal that they carry,
    layers are added up.
    """
    total = 0.0
    for norm in norms:
        if norm.name in scales and norm.name in variances:
            v, c2 = variances[norm.name].double(), scales[norm.name] ** 2
            ratio = torch.sqrt(c2 * (v + norm.eps) / (c2 * v + norm.eps))
            total += float(torch.sqrt(((ratio - 1) ** 2 * v / (v + norm.eps)).mean()))
    return _BOUND_SAFETY * total


@contextlib.contextmanager
def _full_precision() -> Iterator[None]:
    matmul = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.compiler.set_stance("force_eager"), torch.backends.cudnn.flags(allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
