"""SGD whose rate differs between the regions of a weight."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from growlab.optim.rates import RateRule
from growlab.optim.regions import Regions


class RegionalSGD(torch.optim.SGD):
    """`torch.optim.SGD` with a rate per region.

    With d the update that SGD computes from gradient, weight decay and momentum, a weight with regions moves by

        W_k <- W_k - lr * scale * factor_k * d_k,    factor_k = rule(||W_0||, ||W_1||, ...)_k

    (Yuan et al. 2023, Eq. 5). The rate multiplies the update, so weight decay is scaled with it. Parameters
    without regions, and weights that have only one, are updated as by `torch.optim.SGD`, bit for bit.

    Args:
        params: parameters or groups of them, as for `torch.optim.SGD`.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as for `torch.optim.SGD`.
        rule: turns region norms into factors; None for one rate.
    """

    def __init__(
        self,
        params: object,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        rule: RateRule | None = None,
    ) -> None:
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov, maximize=maximize)
        self.rule = rule
        self._regions: dict[Tensor, Regions] = {}
        self._scales: dict[Tensor, float] = {}
        # A rule that leaves a lone region at its base rate needs no work on weights that never grew.
        self._spares_one = rule is not None and bool(
            torch.equal(rule.factors(torch.tensor([2.0])), torch.ones(1))
        )

    def set_regions(
        self, regions: Mapping[Tensor, Regions], scales: Mapping[Tensor, float] | None = None
    ) -> None:
        """Say which elements of which parameters came when; call it again after every growth event.

        Args:
            regions: by parameter.
            scales: a further factor on a parameter's rate (1 / C_0 on the output layer, Table 1).

        Raises:
            ValueError: regions of another shape than the parameter's.
        """
        for param, region in regions.items():
            if tuple(region.index_OI.shape) != tuple(param.shape[:2]):
                raise ValueError(
                    f"regions of {tuple(region.index_OI.shape)} do not fit a weight of {tuple(param.shape)}"
                )
        self._regions = {param: region.to(param.device) for param, region in regions.items()}
        self._scales = dict(scales or {})

    def factors(self, param: Tensor) -> Tensor | None:
        """Rate factor of each region of a parameter now, [K]; None where it has none."""
        regions = self._regions.get(param)
        if self.rule is None or regions is None:
            return None
        return self.rule.factors(regions.norms(param)) * self._scales.get(param, 1.0)

    def region_norms(self, param: Tensor) -> tuple[Tensor, Tensor] | None:
        """Stages [K] and Frobenius norms [K] of a parameter's regions; None where it has none."""
        regions = self._regions.get(param)
        return None if regions is None else (regions.stages, regions.norms(param))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one update.

        Args:
            closure: computes the loss again and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params, grads, buffers = [], [], []
            for param in group["params"]:
                if param.grad is None:
                    continue
                if self._is_regional(param):
                    self._regional_step(param, group)
                else:
                    params.append(param)
                    grads.append(param.grad)
                    buffers.append(self.state[param].get("momentum_buffer") if group["momentum"] else None)
            if not params:
                continue
            sgd(
                params,
                grads,
                buffers,
                foreach=group["foreach"],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
            )
            if group["momentum"]:
                for param, buffer in zip(params, buffers, strict=True):
                    self.state[param]["momentum_buffer"] = buffer
        return loss

    def _is_regional(self, param: Tensor) -> bool:
        if self.rule is None or param not in self._regions:
            return False
        if self._scales.get(param, 1.0) != 1.0 or not self._spares_one:
            return True
        return self._regions[param].num_regions > 1

    def _regional_step(self, param: Tensor, group: dict[str, object]) -> None:
        update = -param.grad if group["maximize"] else param.grad
        if group["weight_decay"]:
            update = update.add(param, alpha=group["weight_decay"])
        if group["momentum"]:
            state = self.state[param]
            if state.get("momentum_buffer") is None:
                buffer = state["momentum_buffer"] = update.clone()
            else:
                buffer = state["momentum_buffer"]
                buffer.mul_(group["momentum"]).add_(update, alpha=1 - group["dampening"])
            update = update.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        factors = self._regions[param].spread(self.factors(param), param.dim())
        param.addcmul_(update, factors, value=-group["lr"])
