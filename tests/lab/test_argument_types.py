"""`check_types`: settings are checked against the signature of their `_target_`."""

from math import inf, nan

import pytest

from growlab.base.errors import UserError
from growlab.lab.training.checks import check_types

DATA = {"_target_": "growlab.lab.data.ImageData", "name": "digits"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": {**DATA, "in_memory": "abc"}}, "data.in_memory must be bool | None, not 'abc'."),
        ({"data": {**DATA, "seed": True}}, "data.seed must be int, not True."),
        ({"data": {**DATA, "mean": [0.5, "x"]}}, "data.mean must be "),
        ({"data": {**DATA, "incremental": 3}}, "data.incremental must be Incremental | None, not 3."),
        # Numbers that are not finite, and lists that are too short.
        ({"growth": {"gain": nan}, "gain": nan}, "gain must be a finite number, not nan."),
        ({"schedule": {"widths": [0.5, inf]}}, "schedule.widths must be a finite number, not inf."),
        ({"optimizer": {"_target_": "torch.optim.SGD", "lr": nan}}, "optimizer.lr must be a finite number"),
        ({"ema": {"_target_": "growlab.parts.averages.Averages", "decay": nan}}, "ema.decay must be a finite"),
        ({"data": {**DATA, "validation_fraction": -inf}}, "data.validation_fraction must be a finite number"),
        ({"optimizer": {"_target_": "growlab.optim.Adam", "betas": [0.9]}}, "optimizer.betas must be tuple["),
        (
            {"checkpoint": {"_target_": "growlab.lab.training.SavePolicy", "signals": ["TERM"]}},
            "checkpoint.signals must be ",
        ),
        ({"data": {"_target_": "growlab.lab.data.TokenData", "vocab_size": 256}}, "data.vocab_size must be greater"),
    ],
)
def test_a_value_of_another_type_is_refused(given: dict, message: str) -> None:
    with pytest.raises(UserError) as raised:
        check_types(given)
    assert str(raised.value).startswith(message)


def test_the_users_own_code_may_take_nan() -> None:
    check_types({"data": {"source": {"_target_": "mine.Table", "missing": nan, "most": [inf]}}})


def test_valid_values_and_unknown_names_pass() -> None:
    fits = {"mean": [0, 1.5], "in_memory": None, "validation_fraction": 1, "class_schedule": {0: [1]}, "root": "???"}
    check_types({"data": {**DATA, **fits, "unknown": 3}})
    check_types({"model": {"_target_": "torch.nn.Linear", "in_features": "many"}})
    check_types({"model": {"_target_": "growlab.nowhere.Net", "width": "wide"}, "list": [1, {"a": 2}]})
    sgd = {"_target_": "growlab.optim.SGD", "lr": 0.1, "nesterov": False, "fused": None}
    check_types({"optimizer": sgd})
    with pytest.raises(UserError, match=r"optimizer.nesterov must be bool, not 'abc'"):
        check_types({"optimizer": {**sgd, "nesterov": "abc"}})
    nested = {"network": {"_target_": "growlab.lab.networks.mlp5", "_partial_": True, "width": "wide"}}
    with pytest.raises(UserError, match=r"model.network.width must be int, not 'wide'"):
        check_types({"model": {"_target_": "growlab.parts.hypernets.hypernetwork", **nested}})
