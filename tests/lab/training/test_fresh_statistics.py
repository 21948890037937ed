"""Statistics of the current weights for evaluation, without effects on training."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from growlab.lab.data import ImageData
from growlab.lab.training.fresh_statistics import fresh_statistics
from tests.cases import Around
from tests.command_line import CommandLine
from tests.whole_runs import MLP, mlp3


class Centred(nn.Module):
    """A custom normalisation with running statistics like torch's."""

    def __init__(self, num_features: int, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.running_mean
        if self.training:
            mean = x.mean((0, 2, 3))
            self.running_mean.lerp_(mean.detach(), self.momentum)
            self.running_var.lerp_(x.detach().var(), self.momentum)
        return x - mean[:, None, None]


class Twice(nn.Module):
    """A norm called twice, one with cumulative averages and a custom one, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.cumulative = nn.BatchNorm2d(3), nn.BatchNorm2d(3, momentum=None)
        self.dropout, self.own = nn.Dropout(0.5), Centred(3, momentum=0.3)
        self.seen: dict[str, list[torch.Tensor]] = {"twice": [], "cumulative": [], "own": []}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("twice", "twice", "cumulative", "own"):
            self.seen[name].append(x.detach())
            x = self.dropout(getattr(self, name)(x)).relu()
        return x


def test_other_buffers_are_not_changed():
    x, scale = torch.randn(16, 3), nn.Buffer(torch.tensor(3.0))
    network = Around(lambda net, x: net.norm(net.scale * x), norm=nn.BatchNorm1d(3), scale=scale)
    fresh = fresh_statistics(network, [(x,)])
    assert set(fresh) == {"norm.running_mean", "norm.running_var"}
    torch.testing.assert_close(fresh["norm.running_mean"], 3 * x.mean(0))
    torch.testing.assert_close(fresh["norm.running_var"], 9 * x.var(0))


class TrainOnly(nn.Module):
    """Norm that is only called in train mode, as in auxiliary heads of torchvision's GoogLeNet."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) if self.training else x


class Normaliser(nn.Module):
    """Normalisation of inputs by fixed statistics, without a momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(4, 1))
        self.register_buffer("running_var", torch.ones(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.running_mean) / self.running_var


@pytest.mark.parametrize(
    "keeps",
    [nn.BatchNorm1d(4, momentum=0.0), nn.InstanceNorm1d(4, track_running_stats=True), Normaliser(), TrainOnly()],
    ids=lambda module: type(module).__name__,
)
def test_norms_without_batch_statistics_keep_theirs(keeps: nn.Module) -> None:
    network, x = nn.Sequential(nn.Conv1d(3, 4, 1), keeps, nn.BatchNorm1d(4)), torch.randn(8, 3, 5)
    fresh = fresh_statistics(network, [(x,)])
    assert set(fresh) == {"2.running_mean", "2.running_var"}
    # A later norm has the inputs of evaluation.
    torch.testing.assert_close(fresh["2.running_mean"], network[:2].eval()(x).mean((0, 2)))


def expert() -> nn.Module:
    """Network with a norm for batches of positive mean only."""
    return Around(lambda net, x: net.norm(x) if x.mean() > 0 else x, norm=nn.BatchNorm1d(3))


def test_means_are_over_the_batches_that_reach_a_norm() -> None:
    x = torch.rand(8, 3)
    fresh = fresh_statistics(expert(), [(x,), (-x,), (x,)])
    torch.testing.assert_close(fresh["norm.running_mean"], x.mean(0))
    torch.testing.assert_close(fresh["norm.running_var"], x.var(0))


def one_rank(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    x = torch.rand(8, 3, generator=torch.Generator().manual_seed(0))
    # The norm gets no batch on rank 1, and one of two on rank 0.
    fresh = fresh_statistics(expert(), [(-x if rank else x,), (-x,)])
    torch.testing.assert_close(fresh["norm.running_mean"], x.mean(0))
    torch.testing.assert_close(fresh["norm.running_var"], x.var(0))
    torch.distributed.destroy_process_group()


def test_a_norm_may_get_batches_on_one_rank_only(tmp_path: Path, cli: CommandLine) -> None:
    cli.on_two_ranks(one_rank, tmp_path)


def test_dropout_is_off_while_statistics_are_computed():
    network, found = Twice().double(), []
    batches = [(torch.randn(8, 3, 4, 4, dtype=torch.float64),)]
    for training in (True, False):
        found.append(fresh_statistics(network.train(training), batches))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())


def test_fresh_statistics_are_means_over_batches():
    torch.manual_seed(0)
    network = Twice().double()
    for module in (network.twice, network.cumulative):
        module.running_mean.normal_()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    batches = [(torch.randn(8, 3, 4, 4, dtype=torch.float64) + shift,) for shift in (0.0, 2.0, -1.0)]
    network.train()
    network.twice.eval()
    modes = [module.training for module in network.modules()]
    fresh = fresh_statistics(network, batches)
    assert [module.training for module in network.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert set(fresh) == {f"{n}.running_{kind}" for n in network.seen for kind in ("mean", "var")}
    for name in ("cumulative", "own"):
        means = torch.stack([x.mean((0, 2, 3)) for x in network.seen[name]])
        torch.testing.assert_close(fresh[f"{name}.running_mean"], means.mean(0), rtol=1e-5, atol=1e-6)
    variances = [x.var((0, 2, 3)) for x in network.seen["cumulative"]]
    torch.testing.assert_close(fresh["cumulative.running_var"], torch.stack(variances).mean(0), rtol=1e-5, atol=1e-6)
    # Of two calls per batch, the second weighs 1 / (1 - momentum) times as much as the first.
    pairs = torch.stack([x.mean((0, 2, 3)) for x in network.seen["twice"]]).view(3, 2, 3).mean(0)
    torch.testing.assert_close(fresh["twice.running_mean"], (0.9 * pairs[0] + pairs[1]) / 1.9, rtol=1e-5, atol=1e-6)


def test_runs_evaluate_with_fresh_statistics_and_train_the_same_as_without(uninterrupted):
    arguments = (*MLP, "optimizer.lr=0.2", "schedule.learning_rate.shape=constant")
    lagging, fresh = (uninterrupted(*arguments, f"batch_norm_samples={n}") for n in (0, 64))
    # Rates, growth and checkpoints equal those of a run that evaluates with running averages.
    assert fresh.differences(lagging) == ["metrics", "results", "weights"]
    for one, other in zip(lagging.metrics, fresh.metrics, strict=True):
        assert one["train_loss"] == other["train_loss"]
        assert float(one["val_loss"]) != float(other["val_loss"])
    # The saved statistics are those of two augmented batches of the last epoch ...
    data = ImageData("digits", limit_train=96, limit_test=40, batch_size=32, shift=1, validation="split")
    data.setup()
    network = mlp3(data.image_shape, data.num_classes, width=12, batch_norm=True)
    network.load_state_dict(fresh.weights)
    first = next(m for m in network.modules() if isinstance(m, nn.BatchNorm1d))
    seen = []
    first.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    batches = list(data.training_loader(5, 5))[:2]
    network.train()
    own = first.running_mean.clone()
    for x, _ in batches:
        network(x)
    torch.testing.assert_close(own, torch.stack([x.mean(0) for x in seen]).mean(0))
    # ... and were used in the last evaluation.
    network.load_state_dict(fresh.weights)
    network.eval()
    losses = [F.cross_entropy(network(x), y, reduction="sum").item() for x, y in data.val_dataloader()]
    assert sum(losses) / data.num_val == pytest.approx(float(fresh.metrics[-1]["val_loss"]), rel=1e-5)
