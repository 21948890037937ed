"""Adam and AdamW whose rates and bias corrections differ between the regions of a weight."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from growlab.optim.regional import Regional, to_device
from growlab.optim.regions import Regions


class _Aged(Regional):
    """Base of Adam and AdamW: ages of regions, and the update with a rate and bias correction per region.

    A region's age starts with the call of `set_regions` that adds it, unless its second moments were copied from
    another region (replication): then it is as old as the oldest region. `region_start` in the state maps each stage to
    the step at which its region was added.
    """

    _init_group: Any

    def set_regions(self, regions: Mapping[Tensor, Regions], scales: Mapping[Tensor, float] | None = None) -> None:
        """Set regions as `Regional.set_regions` does; new regions start with age 0 at this step."""
        super().set_regions(regions, scales)
        for param, region in self._regions.items():
            state = self.state.get(param, {})
            if "exp_avg_sq" not in state:
                continue
            # State of torch's Adam has a single age: regions with moments are as old as its steps.
            starts = state.get("region_start", {})
            inherited = region.norms(state["exp_avg_sq"]) > 0
            newborn = int(state["step"])
            oldest = min(starts.values(), default=0)
            stages = region.stage_list
            state["region_start"] = {
                stage: starts.get(stage, oldest if has_moments else newborn)
                for stage, has_moments in zip(stages, inherited.tolist(), strict=True)
            }

    def region_ages(self, param: Tensor) -> Tensor | None:
        """Number of steps that each region of a parameter has been trained for, [K]; None without regions."""
        regions = self._regions.get(param)
        if regions is None:
            return None
        state = self.state.get(param, {})
        step = int(state["step"]) if "step" in state else 0
        starts = state.get("region_start", {})
        return torch.tensor([step - starts.get(stage, 0) for stage in regions.stage_list], device="cpu")

    def _is_regional(self, param: Tensor) -> bool:
        if super()._is_regional(param):
            return True
        if self._rule is None or param not in self._regions:
            return False
        starts = self.state[param].get("region_start") if param in self.state else None
        return starts is not None and len(set(starts.values())) > 1

    def _step_group(self, group: dict[str, Any], params: list[Tensor]) -> None:
        super()._step_group(group, params)
        if self._rule is None:
            return
        for param in params:
            if param in self._regions and "region_start" not in self.state[param]:
                stages = self._regions[param].stage_list
                self.state[param]["region_start"] = dict.fromkeys(stages, 0)

    def _step_plain(self, group: dict[str, Any]) -> None:
        params, grads, means, squares, largest, steps = lists = [list[Tensor]() for _ in range(6)]
        has_complex = self._init_group(group, *lists)
        adam(
            params,
            grads,
            means,
            squares,
            largest,
            steps,
            amsgrad=group["amsgrad"],
            has_complex=has_complex,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            foreach=self._foreach(group),
            capturable=group["capturable"],
            differentiable=group["differentiable"],
            fused=group["fused"],
            decoupled_weight_decay=group["decoupled_weight_decay"],
        )

    def _step_regional(self, group: dict[str, Any], factors_PK: Tensor) -> None:
        params: list[Tensor] = group["params"]
        lists = [list[Tensor]() for _ in range(6)]
        self._init_group(group, *lists)
        steps = lists[5]
        torch._foreach_add_(steps, 1)
        beta1, beta2 = (float(beta) for beta in group["betas"])
        ages_PK = torch.stack(steps).double()[:, None] - self._starts(params, factors_PK.shape[1], steps[0].device)
        device = factors_PK.device
        unbias2_PK = to_device((1 - beta2**ages_PK).sqrt_(), device)
        rates_PK = factors_PK * group["lr"]
        values = [-rates_PK * unbias2_PK / to_device(1 - beta1**ages_PK, device), group["eps"] * unbias2_PK]
        decoupled = group["decoupled_weight_decay"] and group["weight_decay"] != 0
        if decoupled:
            values.append(1 - rates_PK * group["weight_decay"])
        keys = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]
        tensors = [self._gradients(params)]
        tensors += [[self._aligned_state(p, key) for p in params] for key in keys]
        self._sweep(params, tensors, values, lambda *pieces: _update(group, decoupled, *pieces))

    def _starts(self, params: list[Tensor], num_regions: int, device: torch.device) -> Tensor:
        """Step at which each region was added, [P, K], padded with 0."""
        starts = [self.state[param].get("region_start", {}) for param in params]
        known = self._kept.get(params[0])
        if known is None or known[0] != (starts, num_regions, device):
            stages = [self._regions[param].stage_list for param in params]
            rows = [[start.get(stage, 0) for stage in own] for start, own in zip(starts, stages, strict=True)]
            padded = [row + [0] * (num_regions - len(row)) for row in rows]
            starts_PK = to_device(torch.tensor(padded, dtype=torch.float64, device="cpu"), device)
            known = self._kept[params[0]] = ([dict(start) for start in starts], num_regions, device), starts_PK
        return known[1]


class Adam(_Aged, torch.optim.Adam):
    """`torch.optim.Adam` with a rate and an age per region (Yuan et al. 2023, Table 9, Appendix C).

    With a_k the number of steps that region k has been trained for,

        W_k <- W_k - lr * scale * factor_k * (m_k / (1 - beta1^a_k)) / (sqrt(v_k / (1 - beta2^a_k)) + eps)

    Takes every argument of `torch.optim.Adam`, and `rule`; see `Regional`. Vectors have ages too. Without a rule
    there is one age, torch's step.
    """


class AdamW(_Aged, torch.optim.AdamW):
    """`torch.optim.AdamW` with a rate and an age per region; see `Adam`.

    Weight decay is decoupled and scaled with the region's rate: W_k <- (1 - lr * factor_k * weight_decay) W_k.
    """


def _fused_moments(weights: Any, grads: Any, means: Any, squares: Any, beta1: float, beta2: float) -> None:
    """Update both moments in one pass by torch's fused kernel, at rate 0, which leaves the weights unchanged."""
    one = torch.ones((), dtype=torch.float32, device="cpu")
    torch._fused_adam_(
        weights,
        grads,
        means,
        squares,
        [],
        [one] * len(weights),
        lr=0.0,
        beta1=beta1,
        beta2=beta2,
        weight_decay=0.0,
        # Any value above 0, since the rate is 0; eps=0 would give 0 / 0 where moments are 0.
        eps=1.0,
        amsgrad=False,
        maximize=False,
    )


def _update(group: dict[str, Any], decoupled: bool, weights: Any, grads: Any, *rest: Any) -> None:
    means, squares, *largest = rest[: 3 if group["amsgrad"] else 2]
    rates, eps, *keep = rest[3 if group["amsgrad"] else 2 :]
    beta1, beta2 = (float(beta) for beta in group["betas"])
    if group["maximize"]:
        grads = torch._foreach_neg(grads)
    if decoupled:
        torch._foreach_mul_(weights, keep[0])
    elif group["weight_decay"] != 0:
        grads = torch._foreach_add(grads, weights, alpha=group["weight_decay"])
    if group["fused"] and weights[0].device.type == "cpu":
        _fused_moments(weights, grads, means, squares, beta1, beta2)
    else:
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - beta2)
    if largest:
        torch._foreach_maximum_(largest[0], squares)
        squares = largest[0]
    # (m / b1) / (sqrt(v) / b2 + eps) = (b2 / b1) m / (sqrt(v) + eps b2): the corrections can stay row vectors.
    roots = torch._foreach_sqrt(squares)
    if group["differentiable"]:
        roots = torch._foreach_add(roots, eps)
    else:
        torch._foreach_add_(roots, eps)
    torch._foreach_addcmul_(weights, torch._foreach_div(means, roots), rates)
