"""Averages in a plain loop."""

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from growlab.parts import Averages
from tests.test_grower import PROBE, Loop, mlp, normed


def test_averages_grow_along_as_a_part_or_as_a_module_of_ones_own() -> None:
    average = Averages(decay=0.7)
    loop = Loop(parts=[average])
    own = AveragedModel(loop.network, multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=True)
    loop.grower.follow(own)
    loop.optimizer.register_step_post_hook(lambda *_: own.update_parameters(loop.network))
    loop.train()
    for name, tensor in own.module.state_dict().items():
        assert torch.equal(average.module.state_dict()[name], tensor), name
    assert all(e["ema_parity_error_eval"] < 1e-5 for e in loop.grower.events)
    outputs = average.module.eval()(PROBE)
    loop.grower.finish()
    plain = mlp().eval()
    plain.load_state_dict(average.module.state_dict())
    assert torch.allclose(plain(PROBE), outputs, atol=1e-6)


@pytest.mark.parametrize("killed", [2, 3, 4, 9])
def test_averages_resume(killed) -> None:
    def loop() -> Loop:
        return Loop(network=normed, parts=[Averages(decay=0.7)])

    def average(loop: Loop) -> list[object]:
        return [t.tolist() for t in loop.grower.parts[0].module.state_dict().values()]

    resumed = loop().resume(loop().train(killed).saved()).train()
    assert average(resumed) == average(loop().train())
