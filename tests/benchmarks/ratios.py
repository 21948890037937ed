"""Costs of growlab relative to the same work without it, with the least possible value and a target.

    python -m tests.benchmarks                    # everything, in a table: `make bench`
    python -m tests.benchmarks -k event,trace     # some of it
    python -m tests.benchmarks --device cuda --write FILE

Both sides of a ratio are timed alternately and compared by their best times, to reduce effects of other load.
"""

import copy
import ctypes
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab import Grower, VarianceTransfer
from growlab.lab.networks import resnet18
from growlab.optim import SGD, AdamW, NormRatio
from growlab.widths import trace


@dataclass
class Ratio:
    """A measured ratio, its least possible value and its target; `seconds` are growlab's."""

    what: str
    on: str
    value: float
    limit: float
    target: float
    seconds: float | None = None


@dataclass
class Setting:
    """Device, size of networks (`small` for tests), and repeats."""

    device: str = "cpu"
    small: bool = False
    repeats: int = 5

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else torch.bfloat16


def timed(device: str, function: Callable[[], Any]) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    # CPU time depends less on other processes.
    clock = time.thread_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    function()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - began


def in_turns(setting: Setting, *functions: Callable[[], Any], repeats: int = 0) -> list[float]:
    """Best seconds of each function."""
    rounds = [
        [timed(setting.device, function) for function in functions] for _ in range((repeats or setting.repeats) + 1)
    ]
    return [min(times) for times in zip(*rounds[1:], strict=True)]


def llama(layers: int, width: int, vocab: int = 1000) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 8 * 8,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        vocab_size=vocab,
        use_cache=False,
        attn_implementation="eager" if vocab < 100 else "sdpa",
    )
    return LlamaForCausalLM(config)


def bottlenecks(small: bool) -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]} if small else {}
    return ResNetForImageClassification(ResNetConfig(layer_type="bottleneck", num_labels=100, **sizes))


@dataclass
class Case:
    """A network that returns logits, and its inputs."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]

    def on(self, setting: Setting) -> tuple[nn.Module, Tensor]:
        network, x = self.make().to(setting.device, setting.dtype), self.inputs().to(setting.device)
        return network, x.to(setting.dtype) if x.is_floating_point() else x


def images(side: int, batch: int = 32) -> Callable[[], Tensor]:
    return lambda: torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(0))


def tokens(length: int, vocab: int, batch: int = 4) -> Callable[[], Tensor]:
    return lambda: torch.randint(vocab, (batch, length), generator=torch.Generator().manual_seed(0))


def cases(setting: Setting) -> list[Case]:
    """ResNet-18 and a Llama of 10 million parameters; on a GPU ResNet-50 too, and a Llama of 120 million."""
    torch.manual_seed(0)
    eighteen = functools.partial(resnet18, image_shape=(3, 32, 32), num_classes=100, width=8 if setting.small else 64)
    if setting.small:
        return [
            Case("ResNet-18", eighteen, images(32)),
            Case("Llama", functools.partial(llama, 2, 64), tokens(16, 1000)),
        ]
    large = setting.device != "cpu"
    fifty = Case("ResNet-50", functools.partial(bottlenecks, False), images(224 if large else 64))
    made = functools.partial(llama, 12, 768, 32000) if large else functools.partial(llama, 6, 320, 4000)
    return [
        Case("ResNet-18", eighteen, images(32, 128 if large else 32)),
        *[fifty] * large,
        Case("Llama 120 M" if large else "Llama 10 M", made, tokens(256 if large else 64, 4000)),
    ]


def logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def train_step(network: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    out = logits(network(x))
    F.cross_entropy(out.flatten(0, -2).float(), out.new_zeros(out[..., 0].numel(), dtype=torch.long)).backward()
    optimizer.step()


# Measures -----------------------------------------------------------------------------------------------


def traces(setting: Setting) -> Iterator[Ratio]:
    """`growlab.trace` relative to `torch.export.export`."""
    found = [(case.name, *case.on(setting), 1.3) for case in cases(setting)]
    if not setting.small and setting.device == "cpu":
        import torchvision.models as vision

        found = [
            ("ResNet-50", vision.resnet50(), images(64, 2)(), 1.3),
            ("Llama, 8 layers", llama(8, 256), tokens(16, 1000, 2)(), 1.3),
            ("ViT-B", vision.vit_b_16(), images(224, 2)(), 1.6),
            ("Swin-T", vision.swin_t(), images(224, 2)(), 2.3),
            ("ShuffleNet", vision.shufflenet_v2_x1_0(), images(64, 2)(), 2.0),
        ]
    for name, network, x, target in found:

        def bare(network: nn.Module = network, x: Tensor = x) -> None:
            with torch.no_grad():
                torch.export.export(network.eval(), (x,), strict=False)

        ours, theirs = in_turns(setting, functools.partial(trace, network, x), bare, repeats=min(3, setting.repeats))
        yield Ratio("trace / bare torch.export", name, ours / theirs, 1.0, target, ours)


def events(setting: Setting) -> Iterator[Ratio]:
    """An event at half the width relative to a forward pass before and one after; peak memory in network sizes.

    The peak above that of a training step is the additional memory that a run needs.
    """
    for case in cases(setting):
        network, x = case.on(setting)
        graph = trace(network, x[:2])
        ratios, peaks, rests, seconds = [], [], [], []
        # The first three measure memory, which would slow the timing.
        for number in range(setting.repeats + 4):
            return_memory(number < 3)
            grown = copy.deepcopy(network)
            grower = Grower(grown, x, graph=graph, trigger={0: 0.5, 1: 1.0}, verbose=False)
            optimizer = torch.optim.AdamW(grown.parameters(), lr=1e-4)
            grower.follow(optimizer)
            grower.step(epoch=0)
            train_step(grown, optimizer, x)
            optimizer.zero_grad()
            forward = functools.partial(without_gradients, grown, x)
            forward()
            before = timed(setting.device, forward)
            if number > 2:
                spent = timed(setting.device, functools.partial(grower.step, epoch=1))
                forward()
                seconds.append(spent)
                ratios.append(spent / (before + timed(setting.device, forward)))
                continue
            memory = Peak(setting.device)
            grower.step(epoch=1)
            size, peak = sum(p.nbytes for p in grown.parameters()), memory.above()
            memory = Peak(setting.device)
            train_step(grown, optimizer, x)
            optimizer.zero_grad()
            peaks.append(peak / size)
            rests.append(max(0, peak - memory.above()) / size)
        yield Ratio("event / a forward before and after", case.name, min(ratios[1:]), 1.0, 2.5, min(seconds[1:]))
        yield Ratio("event's peak, in sizes of the grown", case.name, min(peaks[1:]), 0.3, 0.5)
        yield Ratio("the same above a training step's peak", case.name, min(rests[1:]), 0.0, 0.5)


def without_gradients(network: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        network(x)


def return_memory(at_once: bool) -> None:
    """Return freed blocks of at least 64 KiB to the system `at_once`, so that RSS follows live tensors, or as usual.

    Do not time with `at_once`, since new pages for each tensor are slow.
    """
    ctypes.CDLL(None).mallopt(-3, 1 << (16 if at_once else 25))  # M_MMAP_THRESHOLD


class Peak:
    """Peak of allocated memory in bytes above the larger of now and the call of `above` (see `return_memory`)."""

    def __init__(self, device: str) -> None:
        self._device = device
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        self._before = _status("VmRSS")

    def above(self) -> int:
        if self._device != "cpu":
            return torch.cuda.max_memory_allocated() - max(self._before, torch.cuda.memory_allocated())
        return _status("VmHWM") - max(self._before, _status("VmRSS"))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))


def loops(setting: Setting) -> Iterator[Ratio]:
    """Training steps with a Grower relative to those without, and additional time for multipliers and regions."""
    steps = 10 if setting.device != "cpu" else 1
    sgd = functools.partial(torch.optim.SGD, lr=1e-6, momentum=0.9)
    regional = functools.partial(SGD, lr=1e-6, momentum=0.9, rule=NormRatio())
    multiplied = VarianceTransfer(multipliers="keep")
    for case in cases(setting):
        network, x = case.on(setting)
        graph, x = trace(network, x[:2]), x[:8] if setting.device == "cpu" else x

        def looped(
            make: Any, method: Any = None, network: nn.Module = network, x: Tensor = x, graph: Any = graph
        ) -> Any:
            trained, grower = copy.deepcopy(network), None
            optimizer = make(trained.parameters())
            if method is not None:
                trigger = {0: 0.5, 1: 1.0}
                grower = Grower(
                    trained, x[:2], graph=graph, method=method, trigger=trigger, anneal_steps=0, verbose=False
                )
                grower.follow(optimizer)
                grower.step(epoch=0)
                train_step(trained, optimizer, x)
                grower.step(epoch=1)
                train_step(trained, optimizer, x)

            def loop() -> None:
                for _ in range(steps):
                    if grower is not None:
                        grower.step(epoch=1)
                    train_step(trained, optimizer, x)

            return loop

        ways = looped(sgd), looped(sgd), looped(sgd, "pairs"), looped(sgd, multiplied), looped(regional, "pairs")
        plain, again, ours, many, rates = in_turns(setting, *ways, repeats=4 * setting.repeats)
        # Addresses of tensors alone make two copies of the plain network differ.
        least, plain = max(plain, again) / min(plain, again), min(plain, again)
        yield Ratio("loop with Grower / without", case.name, ours / plain, least, 1.005, ours / steps)
        yield Ratio("multipliers / none, between events", case.name, many / ours, least, 1.01, many / steps)
        yield Ratio("rates by region / torch's SGD, steps", case.name, rates / plain, least, 1.02, rates / steps)


def callbacks(setting: Setting) -> Iterator[Ratio]:
    """Lightning with the callback `Growth` relative to Lightning without it, with tiny steps."""
    import logging
    import warnings

    import lightning

    from growlab import Growth

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    count = 8 * (50 if setting.small else 400)
    samples = torch.utils.data.TensorDataset(torch.randn(count, 16), torch.randint(10, (count,)))
    data = torch.utils.data.DataLoader(samples, batch_size=8)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)

    class Timed(lightning.Callback):
        def __init__(self, found: list[float]) -> None:
            self.found = found

        def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
            # In the last epoch, after all events.
            if trainer.current_epoch == 2:
                now = time.thread_time() if setting.device == "cpu" else time.perf_counter()
                self.began, before = now, getattr(self, "began", None)
                self.found += [] if before is None else [now - before]

    growth = functools.partial(Growth, "network", method="pairs", trigger={0: 0.5, 1: 1.0}, verbose=False)
    kinds: dict[str, list[Callable[[], lightning.Callback]]] = {
        "without": [],
        "idle": [lightning.Callback],
        "growth": [growth],
    }
    steps: dict[str, list[float]] = {kind: [] for kind in kinds}
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 3}
    for _ in range(setting.repeats):
        for kind, more in kinds.items():
            callbacks = [Timed(steps[kind]), *(make() for make in more)]
            trainer = lightning.Trainer(
                accelerator="cpu" if setting.device == "cpu" else "gpu",
                devices=1,
                enable_model_summary=False,
                callbacks=callbacks,
                **options,
            )
            trainer.fit(Module(), data)
    # Other load slows most steps, but not the fastest.
    plain, idle, ours = (quantiles(times, n=10)[0] for times in steps.values())
    # Lightning spends time on each callback, even an idle one.
    yield Ratio("Lightning with Growth / without", "tiny steps", ours / plain, idle / plain, 1.01, ours)
    yield Ratio("Lightning with Growth / an idle callback", "tiny steps", ours / idle, 1.0, 1.01, ours)


def optimizers(setting: Setting) -> Iterator[Ratio]:
    """Steps with rates by region, of nine stages, relative to torch's fused ones, on ResNet-18."""
    from growlab.growth import make_schedule
    from growlab.optim import weight_regions

    case = cases(setting)[0]
    network, x = case.on(setting)
    graph = trace(network, x[:2])
    births: dict[str, list[int]] = {name: [] for name in graph.groups}
    for stage, widths in enumerate(make_schedule(160, 128).widths(graph)):
        for name, born in births.items():
            born.extend([stage] * (widths[name] - len(born)))
    regions = weight_regions(graph, births)

    def prepared(make: Any) -> Callable[[], None]:
        trained = copy.deepcopy(network)
        optimizer = make(trained.parameters())
        for parameter in trained.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        if hasattr(optimizer, "set_regions"):
            names = trained.named_parameters()
            optimizer.set_regions({p: regions[n].to(p.device) for n, p in names if n in regions})

        def step() -> None:
            for _ in range(3):
                optimizer.step()

        return step

    for theirs, ours, options in (
        (torch.optim.SGD, SGD, {"lr": 1e-6, "momentum": 0.9, "weight_decay": 5e-4}),
        (torch.optim.AdamW, AdamW, {"lr": 1e-6}),
    ):
        plain, rates = in_turns(
            setting,
            prepared(functools.partial(theirs, fused=True, **options)),
            prepared(functools.partial(ours, rule=NormRatio(), fused=True, **options)),
        )
        on = f"{theirs.__name__}, {case.name}"
        yield Ratio("steps with rates by region / torch's fused", on, rates / plain, 1.0, 1.6, rates / 3)
        # A training step, with a plain optimizer.
        x = images(32, 8 if setting.small else 128)().to(setting.device, setting.dtype)
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-6)
        (whole,) = in_turns(setting, functools.partial(train_step, network, optimizer, x), repeats=1)
        share = (rates - plain) / 3 / whole
        yield Ratio("the same above torch's, share of an epoch", on, share, 0.0, 0.0, whole)


def sparsified(setting: Setting) -> Iterator[Ratio]:
    """Inference with nine maps, four of them vectors, relative to the dense network (Eq. 19 with D = 4)."""
    from growlab.parts.isotropic import IsotropicMLP, sparsify

    for width in (64,) if setting.small else (256, 1024):
        torch.manual_seed(0)
        dense = IsotropicMLP(width, [width] * 8, width).to(setting.device).eval()
        x = torch.randn(64, width, device=setting.device)
        sparse = sparsify(dense, trace(dense, x[:2], follow_norms=True))
        ours, theirs = in_turns(
            setting,
            functools.partial(without_gradients, sparse, x),
            functools.partial(without_gradients, dense, x),
            repeats=4 * setting.repeats,
        )
        yield Ratio("sparsified / dense, inference", f"width {width}", ours / theirs, 5 / 9, 1.0, ours)


def widened(setting: Setting) -> Iterator[Ratio]:
    """`growlab widen` to twice the width: peak memory per parameter of the output, and CPU seconds.

    Both minus those of a tiny model, which are for Python and libraries.
    """
    import transformers

    transformers.logging.disable_progress_bar()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, sizes in (("tiny", (2, 64, 100)), ("large", (2, 128, 100) if setting.small else (6, 512, 4000))):
            llama(*sizes).save_pretrained(f"{folder}/{name}")
            # Start it from a small process: the initial peak of a process is its parent's.
            spawn = (
                "import os, sys; null = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]; "
                "made = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=null); "
                "_, status, used = os.wait4(made, 0); "
                "print(used.ru_maxrss * 1024, used.ru_utime + used.ru_stime); sys.exit(status != 0)"
            )
            command = [sys.executable, "-m", "growlab", "widen", f"{folder}/{name}", "--width", "2"]
            command = [sys.executable, "-c", spawn, *command, "-o", f"{folder}/{name}_wide"]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found.append([*map(float, done.stdout.split())])
        number = json.loads((Path(folder) / "large_wide" / "growlab_widening.json").read_text())["num_params"]
    (least_bytes, least), (most_bytes, most) = found
    on = f"Llama of {number / 1e6:.1f} M parameters"
    yield Ratio("growlab widen, bytes per parameter", on, (most_bytes - least_bytes) / number, 4.0, 6.0)
    yield Ratio("growlab widen, seconds", on, most - least, 1.0, 4.0, most - least)


MEASURES: dict[str, Callable[[Setting], Iterator[Ratio]]] = {
    "trace": traces,
    "event": events,
    "loop": loops,
    "callback": callbacks,
    "optimizer": optimizers,
    "sparse": sparsified,
    "widen": widened,
}


def table(ratios: Iterable[Ratio]) -> Iterator[str]:
    """Yield lines of a table with 80 columns; a star marks a missed target."""
    yield f"{'':38s} {'measured':>9s} {'limit':>7s} {'target':>7s} {'seconds':>9s}"
    what = None
    for one in ratios:
        if one.what != what:
            yield (what := one.what)
        seconds = "" if one.seconds is None else f"{one.seconds:9.4f}"
        missed = " *" if one.value > one.target else ""
        yield f"  {one.on:36s} {one.value:9.3f} {one.limit:7.2f} {one.target:7.3f} {seconds:>9s}{missed}"
