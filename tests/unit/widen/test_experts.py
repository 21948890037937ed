"""More experts for a growing mixture: same outputs, carried moments, copies that separate, averages, checkpoints."""

import copy
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from growlab import Grower, UserError
from growlab.growth.parity import relative_error
from growlab.inspect.small_models import small_model
from tests.cases import differing, same_parameters
from tests.unit.grower.test_trained import TEXT, TOKENS, llama, loss_of, mixtral, output, same, train

pytest.importorskip("transformers")


def of_kind(kind: str) -> Any:
    torch.manual_seed(0)
    model: Any = small_model(kind)[0].network
    return model.train()


def growing(make: Any, at: dict[float, Any] | None = None) -> tuple[Any, Any, Grower]:
    torch.manual_seed(0)
    network = make()
    inputs = {"input_ids": TOKENS % network.config.vocab_size}
    grower = Grower(network, inputs, trigger=at or {0: 0.5, 1: 1.0}, verbose=False)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    grower.follow(optimizer, state="inherit")
    train(network, optimizer, TEXT, 2)
    return network, optimizer, grower


def experts_of(network: Any) -> dict[str, torch.Tensor]:
    return {n: p for n, p in network.named_parameters() if "experts." in n or n.endswith("gate.weight")}


@pytest.mark.parametrize(
    "kind", ["mixtral", *(pytest.param(k, marks=pytest.mark.slow) for k in ("qwen2_moe", "qwen3_moe", "olmoe"))]
)
def test_outputs_stay_moments_are_the_copies_and_training_separates_them(kind: str) -> None:
    network, optimizer, grower = growing(lambda: of_kind(kind))
    number, chosen = grower.state_dict()["experts"], network.config.num_experts_per_tok
    before, old = output(network, TEXT), experts_of(network)
    moments = {name: dict(optimizer.state[p]) for name, p in old.items()}
    event = grower.multiply_experts(3)
    assert relative_error(before, output(network, TEXT)) < 1e-5
    assert (event.notes["experts_before"], event.notes["experts"]) == (number, 3 * number)
    assert network.config.num_experts_per_tok == 3 * chosen and event.stage == 1
    new = experts_of(network)
    for name, past in moments.items():
        state, copied = optimizer.state[new[name]], len(new[name]) == 3 * number
        assert copied == (len(old[name]) == number)
        for key, power in (("exp_avg", 1), ("exp_avg_sq", 2)):
            expected = past[key].repeat_interleave(3, 0) / 3**power if copied else past[key]
            torch.testing.assert_close(state[key], expected, rtol=1e-6, atol=0.0)
        if name.endswith("down_proj"):
            spread = (new[name].view(number, 3, -1) - old[name].view(number, 1, -1)).detach()
            assert spread.mean(1).abs().max() < 1e-6 < float(spread.std())
        elif copied:
            assert torch.equal(new[name], old[name].repeat_interleave(3, 0))
    train(network, optimizer, TEXT, 3)
    gates = next(p.detach() for name, p in new.items() if name.endswith("gate_up_proj"))
    assert all(float((gates[i] - gates[i + 1]).abs().max()) > 1e-4 for i in range(2))
    before = output(network, TEXT)
    assert len(grower.step(epoch=1)) == 1 and relative_error(before, output(network, TEXT)) < 1e-5
    train(network, optimizer, TEXT, 2)
    grower.finish()
    twin = type(network)(network.config)
    twin.load_state_dict(network.state_dict())
    assert same(twin.to(network.dtype), network, TEXT) < 1e-6


def test_moments_without_noise_are_those_of_the_grown_gradient() -> None:
    """With lr=0 the gradient is the same in each step, and moments after t steps are 1 - beta**t of it."""
    network, optimizer, grower = growing(lambda: mixtral(32, 1))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.state.clear()
    train(network, optimizer, TEXT, 2)
    grower.multiply_experts(2, noise=0.0)
    network.zero_grad()
    loss_of(network.train(), TEXT).backward()
    for name, parameter in experts_of(network).items():
        moment = optimizer.state[parameter]["exp_avg"] / (1 - 0.9**2)
        assert parameter.grad is not None and relative_error(parameter.grad, moment) < 1e-4, name


@pytest.mark.parametrize("network_first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_resumed_training_is_equal_bit_for_bit(network_first: bool) -> None:
    def run(objects: Any, steps: range) -> None:
        network, optimizer, grower, average = objects
        for step in steps:
            if step == 1:
                grower.multiply_experts(2)
            grower.step(epoch=int(step > 2))
            train(network, optimizer, TEXT, 1)
            average.update_parameters(network)

    def begin() -> tuple[Any, ...]:
        network, optimizer, grower = growing(lambda: mixtral(32, 1))
        average = AveragedModel(network)
        grower.follow(average)
        return network, optimizer, grower, average

    first, again = begin(), begin()
    run(first, range(2))
    saved = copy.deepcopy([each.state_dict() for each in first])
    run(first, range(2, 4))
    pairs = list(zip(again, saved, strict=True))
    order = (0, 3, 1, 2) if network_first else (2, 0, 1, 3)
    for index in order:
        pairs[index][0].load_state_dict(pairs[index][1])
    run(again, range(2, 4))
    assert same_parameters(first[0], again[0]) and same_parameters(first[3], again[3])
    assert again[0].config.num_local_experts == 8 and again[3].module.config.num_experts_per_tok == 4


def test_models_without_experts_raise_an_error_and_a_failed_event_changes_nothing(caplog: Any) -> None:
    _, _, grower = growing(lambda: llama(16, 1))
    with pytest.raises(UserError, match="no experts that growlab can multiply"):
        grower.multiply_experts(2)
    network, optimizer, grower = growing(lambda: mixtral(32, 1))
    before, parameters = copy.deepcopy(network.state_dict()), list(network.parameters())
    with pytest.raises(UserError):
        grower.multiply_experts(1)
    handle = network.lm_head.register_forward_hook(lambda module, x, y: y * (1 + network.config.num_local_experts))
    with pytest.raises(UserError, match="does not route to copies"):
        grower.multiply_experts(2)
    handle.remove()
    assert network.config.num_local_experts == 4 and grower.state.stage == 0 and not grower.events
    assert all(one is other for one, other in zip(network.parameters(), parameters, strict=True))
    assert not differing(before, network.state_dict())
    train(network, optimizer, TEXT, 1)
    grower.multiply_experts(2, noise=0.0)
    assert "stay equal throughout training" in caplog.text
