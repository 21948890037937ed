"""Pairs with variance transfer: the paper's "ours" (Yuan et al. 2023, Section 3.1, Table 1, Appendix A)."""

from collections.abc import Mapping
from math import sqrt
from typing import Literal, get_args

from torch import Tensor

from growlab.base.pieces import OneByOne, scalars
from growlab.base.settings import flag, one_of
from growlab.growth.method import GrownTensors, GrowthContext, NewWeights, WeightRule
from growlab.growth.methods.pairs import PairGrowth
from growlab.growth.rescale import rescale
from growlab.widths import Carry, Layer, WidthGraph

#: Treatments of the multipliers 1 / c under optimizers: see `VarianceTransfer`.
Treatment = Literal["auto", "keep", "fold", "compensate"]


class VarianceTransfer(PairGrowth):
    """Grow by pairs and rescale old weights to the variance that new ones are drawn with.

    With fan-in C before and C' after an event (Table 1):

        input layer    W' = W                   new weights N(0, gain / C_x)
        hidden layer   W' = W sqrt(C / C')      new weights N(0, gain / C')
        output layer   W' = W C / C'            new weights N(0, 1 / C'^2)

    `rule="constraint"` takes sqrt(gain / (C Var[W])) from the actual weights of input and hidden layers
    instead (Theorem A.1). A batch normalisation after a layer rescaled by c gets mean c mu, variance c^2 v and
    weight times sqrt((c^2 v + eps) / (c^2 (v + eps))), which makes eval mode exact. One without weight or running
    variance keeps its input's scale.

    What undoes c decides what else changes, so that the network computes what it did:

    - batch normalisation behind the layer, as above. A stream that several layers write to takes the scale of those
      whose fan-in grows; the others (a stem) make up for the difference by a multiplier.
    - elsewhere a multiplier 1 / c on the layer's old rows: the layer computes m_i W_i x + b_i, see
      `growlab.growth.multipliers`. This applies behind and before layer, RMS and group normalisation (queries, keys,
      values and fc1 read a normalised stream; their outputs enter a softmax, a gate or another stream), in networks
      without normalisation, and for the last layer, whatever stands behind it. Layer normalisation would undo a c of
      the whole stream, but for its eps, which no weight can take up as batch normalisation's running statistics let
      it:
      not exactly. `finish` writes m_i W_i into the weights at the end.

    **Steps.** A multiplier m = 1 / c lets an optimizer that normalises gradients (Adam, Lion, Muon) move the weight m W
    that the network uses m times as far as before the event: after growth by four, twice in hidden layers, four times
    in the last one. SGD moves it as before (see `growlab.growth.multipliers`). `multipliers` chooses among

    - "keep": as it is, the paper's rule relative to the stored weight W;
    - "fold": no multiplier, the factor is written into the weight, which is the one that is used. Old weights that no
      batch normalisation follows then stay as they are, and the optimizer moves them as before, whichever it is. New
      entries of old rows, which a multiplier would multiply too, have the variance of Table 1 as the network uses
      them;
    - "compensate": multipliers, by which the steps of torch's and growlab's optimizers that normalise gradients are
      divided, decoupled weight decay aside. Others step as with "keep";
    - "auto": "fold" for weights of optimizers that normalise gradients, as far as the Grower follows them, "keep" for
      the others.

    Measured in short runs (`notebooks/results/adam_multipliers*`): under Adam a Transformer on Multi30k ends at the
    lowest loss with "fold" and the highest with "keep", with all three seeds, "compensate" between them. Under AdamW
    a small Llama on text, whose head is its embedding, ends slightly lower with "fold" than with "keep" at both rates
    with all seeds, and with "compensate" where "keep" does; a larger one ends lower with either of them than with
    "keep", with all three seeds. With a small GPT over characters "keep", which lets the head learn several times as
    fast, is ahead at rates that are too low; at the highest rate tried three seeds show no significant difference.

    With unit-variance inputs and W at its initialisation, rows sum to unit variance before and after the event, new
    ones as well as old ones, as Theorem A.1 asks for.

    **Preserves** exactly in eval mode; in train mode up to batch normalisation's eps: about eps (1/c^2 - 1) / (2 v)
    with batch variance v. Up to `output_factor` without multipliers; nothing if `as_published`.
    **Departs from the paper**: multipliers (what they do to steps: see `growlab.growth.multipliers`) and the fold into
    the norm's weight. Theorem A.1 itself asks for sqrt(1 / (C Var[W])), which is 1 for weights at their
    initialisation: that is the multiplied weight; Table 1's sqrt(C / C') is the stored one.

    Args:
        rule: "fan_in_ratio" (Table 1) or "constraint" (Theorem A.1).
        output_multiplier: undo the scale of the logits. False: they shrink by C / C' at each event, as in the paper.
        layer_multipliers: multiply rows of weights where nothing else undoes c. False: hidden layers without a batch
            normalisation behind them keep their scale, and the logits' is left to `output_factor`.
        rescale_layers_without_batch_norm: let activations without a batch normalisation behind them change their
            scale too, as far as positively homogeneous functions lead; later biases follow. Without multipliers this
            shrinks old activations by the product of all c along the depth, while new ones have full size.
        as_published: rescale every layer as Table 1 says and leave it at that: the receipt shows the error.
        multipliers: "auto", "keep", "fold" or "compensate", see above; without effect if not `layer_multipliers`.
        noise_std: see `GrowthMethod`.
        gain: see `NewWeights`.
        new_weights: its rule.

    Raises:
        ValueError: there is no such rule or treatment of multipliers.
    """

    def __init__(
        self,
        rule: Literal["fan_in_ratio", "constraint"] = "fan_in_ratio",
        output_multiplier: bool = True,
        layer_multipliers: bool = True,
        rescale_layers_without_batch_norm: bool = False,
        as_published: bool = False,
        noise_std: float = 0.0,
        gain: float = 2.0,
        new_weights: WeightRule = "fan_in",
        multipliers: Treatment = "auto",
    ) -> None:
        super().__init__(noise_std, gain)
        one_of(("fan_in_ratio", "constraint"), rule=rule)
        one_of(get_args(Treatment), multipliers=multipliers)
        flag(output_multiplier=output_multiplier, layer_multipliers=layer_multipliers)
        flag(rescale_layers_without_batch_norm=rescale_layers_without_batch_norm, as_published=as_published)
        self.rule = rule
        self.as_published, self.preserves = as_published, not as_published
        self.output_multiplier = output_multiplier and not as_published
        self.layer_multipliers = layer_multipliers and not as_published
        self.rescale_layers_without_batch_norm = rescale_layers_without_batch_norm or as_published
        self.new_weights = NewWeights(gain, output_power=2, rule=new_weights)
        self.multipliers = multipliers
        self.compensates = multipliers == "compensate"

    def grow(self, context: GrowthContext) -> GrownTensors:
        """Compute every tensor at the new widths."""
        graph = context.graph
        wanted = {layer.weight: self._wanted(context, layer.weight) for layer in graph.layers}
        classes = _scales(graph, wanted, self._rescaled_classes(graph))
        # Factor that a weight's scale needs, from those of its input and output.
        needed = {layer.weight: classes[layer.scale_out] / classes[layer.scale_in] for layer in graph.layers}
        multiplied = self.multiplied(context)
        stored = {
            name: factor if name in multiplied or self.as_published else needed[name] for name, factor in wanted.items()
        }
        # Of weights the factor alone, so that none of them has to be there yet.
        small = {name: context.old[name] if len(graph.axes[name]) < 2 else 1.0 for name in context.old}
        changed, norm_scale = rescale(graph, small, classes, stored)

        def expanded(name: str) -> Tensor:
            old, new = context.old[name], changed.get(name)
            if new is None or isinstance(new, float):
                new = old if new is None else old * new
            return self.expand(context, name, new)

        multipliers = {
            name: needed[name] / factor
            for name, factor in stored.items()
            if name in multiplied and factor != needed[name]
        }
        rescaled = {name: factor for name, factor in stored.items() if factor != 1.0}
        return GrownTensors(
            OneByOne(context.old, expanded),
            1.0 if self.as_published else 1.0 / classes.get(graph.output_class, 1.0),
            norm_scale,
            Carry(scales=_gradient_scales(graph, context.old, classes, stored, multipliers)),
            multipliers=multipliers,
            report={"rescaled": rescaled, "multipliers": multipliers} if rescaled or multipliers else {},
        )

    def multiplied(self, context: GrowthContext) -> frozenset[str]:
        """Names of weights whose rows the forward may multiply from now on; others get the factors folded in."""
        weights = super().multiplied(context)
        folded = {"auto": context.normalised, "fold": weights}
        return weights - folded.get(self.multipliers, frozenset())

    def _rescaled_classes(self, graph: WidthGraph) -> frozenset[int]:
        """Scale classes whose scale may differ from that of their input."""
        if self.rescale_layers_without_batch_norm:
            return frozenset(layer.scale_out for layer in graph.layers)
        normalised = {norm.scale_in for norm in graph.norms}
        if self.layer_multipliers and self.output_multiplier:
            return frozenset(normalised - {graph.output_class})
        return frozenset({*normalised, graph.output_class})

    def _wanted(self, context: GrowthContext, weight: str) -> float:
        layer = context.layers.get(weight)
        if layer is None or not context.changes(weight):
            return 1.0
        before = context.graph.fan_in(layer, context.old_widths)
        after = context.graph.fan_in(layer, context.new_widths)
        if weight in context.output_layers:
            return (before / after) ** (self.new_weights.output_power / 2)
        if self.rule == "fan_in_ratio":
            return sqrt(before / after)
        variance = float(context.reference[weight].double().var(correction=0))
        # Weights that are all equal have no variance to restore.
        wanted = self.new_weights.gain * layer.variance_per_entry
        return sqrt(wanted / (before * variance)) if variance > 0 else 1.0


def _scales(graph: WidthGraph, wanted: Mapping[str, float], rescaled: frozenset[int]) -> dict[int, float]:
    """Factor on the activations of each scale class: its input's factor times the wanted factor of the layer's weight.

    If several layers produce a class, the first whose fan-in grows decides. In a stream whose own scale enters its
    branches (without normalisation) no factor but that of its other producers is consistent. Classes that are not
    `rescaled` take on the factor of their input.
    """
    producers: dict[int, list[Layer]] = {}
    for layer in graph.layers:
        producers.setdefault(layer.scale_out, []).append(layer)
    for layers in producers.values():
        layers.sort(key=lambda layer: wanted[layer.weight] == 1.0)
    known = dict.fromkeys(graph.unit_classes, 1.0)
    visiting: set[int] = set()

    def factor(scale: int) -> float | None:
        """Return the factor of a class; None if it depends on a class that is being visited."""
        if scale in known:
            return known[scale]
        if scale in visiting:
            return None
        visiting.add(scale)
        found = None
        for layer in producers.get(scale, []):
            before = factor(layer.scale_in)
            if before is not None:
                found = before * (wanted[layer.weight] if scale in rescaled else 1.0)
                break
        visiting.discard(scale)
        if found is None and visiting:
            return None
        known[scale] = 1.0 if found is None else found
        return known[scale]

    for layer in graph.layers:
        factor(layer.scale_in)
        factor(layer.scale_out)
    return known


def _gradient_scales(
    graph: WidthGraph,
    tensors: Mapping[str, Tensor],
    classes: Mapping[int, float],
    stored: Mapping[str, float],
    multipliers: Mapping[str, float],
) -> dict[str, Tensor]:
    """Factor on the gradient of each rescaled parameter.

    With w' = c w and the same loss it is 1 / c. With a multiplier that becomes q times as large, and a gradient that is
    divided by its square, it is 1 / (c q^2).
    """
    found = (name for norm in graph.norms for name in (norm.running_mean, norm.running_var))
    statistics = {name for name in found if name is not None and name in tensors}
    # A scalar 1 in place of a tensor of ones: only its factor is needed.
    ones = {**scalars(tensors), **{name: tensors[name] for name in statistics}}
    factors, _ = rescale(graph, ones, classes, stored)
    scales = {name: 1.0 / factor for name, factor in factors.items() if name not in statistics}
    for name, multiplier in multipliers.items():
        scales[name] = scales.get(name, ones[name]) / multiplier**2
    return scales
