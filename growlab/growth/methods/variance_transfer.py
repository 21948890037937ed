"""Pairs with variance transfer: the paper's "ours" (Yuan et al. 2023, Section 3.1, Table 1, Appendix A)."""

from collections.abc import Mapping
from math import sqrt
from typing import Literal, get_args

from torch import Tensor

from growlab.base.pieces import OneByOne, scalars
from growlab.base.settings import flag, one_of
from growlab.growth.method import GrownTensors, GrowthContext, NewWeights, WeightRule, in_double
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

    So that the network computes the same as before, c is undone by

    - batch normalisation behind the layer, as above. A stream that several layers write to takes the scale of those
      whose fan-in grows; the others (a stem) compensate by a multiplier;
    - elsewhere a multiplier 1 / c on the layer's old rows: the layer computes m_i W_i x + b_i, see
      `growlab.growth.multipliers`. This applies behind and before layer, RMS and group normalisation (queries, keys,
      values and fc1 read a normalised stream; their outputs enter a softmax, a gate or another stream), in networks
      without normalisation, and for the last layer in any network. Layer normalisation would undo a factor on the whole
      stream only up to its eps, and has no running statistics by which a weight could compensate that. `finish` writes
      m_i W_i into the weights at the end.

    **Steps.** With a multiplier m = 1 / c, an optimizer that normalises gradients (Adam, Lion, Muon) moves the weight
    m W that the network uses m times as far as before the event: after growth by four, twice in hidden layers, four
    times in the last one. SGD moves it as before (see `growlab.growth.multipliers`). The options of `multipliers` are

    - "keep": multiply, the paper's rule for the stored weight W;
    - "fold": no multiplier; the factor is written into the weight. Old weights without a batch normalisation behind
      them then do not change, and any optimizer moves them as before. New entries of old rows, which a multiplier would
      multiply too, have the variance of Table 1 as the network uses them;
    - "compensate": multiply, and divide the steps of torch's and growlab's optimizers that normalise gradients by the
      multipliers, except for decoupled weight decay. Other optimizers step as with "keep";
    - "auto": "fold" for weights whose optimizer, attached to the Grower, normalises gradients, "keep" for the others.

    Measured in short runs (`notebooks/results/adam_multipliers*`): under Adam a Transformer on Multi30k ends at the
    lowest loss with "fold" and the highest with "keep", with all three seeds. Under AdamW a small Llama on text, whose
    head is its embedding, ends slightly lower with "fold" than with "keep" at both rates with all seeds, and equal with
    "compensate" and "keep"; a larger one ends lower with "fold" and "compensate" than with "keep", with all three
    seeds. With a small GPT over characters "keep", whose head learns several times as fast, is ahead at rates that are
    too low; at the highest rate three seeds show no significant difference.

    With unit-variance inputs and W at its initialisation, the outputs of new and old rows have unit variance before and
    after the event, as in Theorem A.1.

    **Preserves** exactly in eval mode; in train mode up to batch normalisation's eps: about eps (1/c^2 - 1) / (2 v)
    with batch variance v. Up to `output_factor` without multipliers; nothing if `as_published`.
    **Departs from the paper**: multipliers (what they do to steps: see `growlab.growth.multipliers`) and the fold into
    the norm's weight. Theorem A.1 itself asks for sqrt(1 / (C Var[W])), which is 1 for weights at their
    initialisation: that is the multiplied weight; Table 1's sqrt(C / C') is the stored one.

    Args:
        rule: "fan_in_ratio" (Table 1) or "constraint" (Theorem A.1).
        output_multiplier: undo the scale of the logits. False: they shrink by C / C' at each event, as in the paper.
        layer_multipliers: multiply rows of weights where nothing else undoes c. False: hidden layers without a batch
            normalisation behind them keep their scale, and `output_factor` undoes the scale of the logits.
        rescale_layers_without_batch_norm: also rescale activations without a batch normalisation behind them, through
            positively homogeneous functions; later biases follow. Without multipliers this shrinks old activations by
            the product of all c along the depth, while new ones have full size.
        as_published: rescale every layer by Table 1 and undo nothing; the receipt shows the error.
        multipliers: "auto", "keep", "fold" or "compensate", see above; ignored if `layer_multipliers` is False.
        noise_std: see `GrowthMethod`.
        gain: see `NewWeights`.
        new_weights: rule of `NewWeights`.

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
        # Factor on each weight that the scales of its input and output need.
        needed = {layer.weight: classes[layer.scale_out] / classes[layer.scale_in] for layer in graph.layers}
        multiplied = self.multiplied(context)
        stored = {
            name: factor if name in multiplied or self.as_published else needed[name] for name, factor in wanted.items()
        }
        # For weights only the factor, so that they are not all in memory at once.
        vectors = {name: context.old[name] if len(graph.axes[name]) < 2 else 1.0 for name in context.old}
        changed, norm_scale = rescale(graph, vectors, classes, stored)

        def expanded(name: str) -> Tensor:
            new = changed.get(name, 1.0)
            if isinstance(new, float):
                new = context.old[name] if new == 1.0 else context.old[name] * new
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
        """Names of weights whose rows the forward may multiply from now on; into others factors are folded."""
        weights = super().multiplied(context)
        folded = {"auto": context.normalised, "fold": weights}
        return weights - folded.get(self.multipliers, frozenset())

    def _rescaled_classes(self, graph: WidthGraph) -> frozenset[int]:
        """Scale classes whose factor may differ from that of their input."""
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
        variance = float(in_double(context.reference[weight]).var(correction=0))
        # Equal weights have no variance.
        wanted = self.new_weights.gain * layer.variance_per_entry
        return sqrt(wanted / (before * variance)) if variance > 0 else 1.0


def _scales(graph: WidthGraph, wanted: Mapping[str, float], rescaled: frozenset[int]) -> dict[int, float]:
    """Factor on the activations of each scale class: its input's factor times the wanted factor of the layer's weight.

    If several layers produce a class, the first whose fan-in grows decides. In a stream without normalisation, whose
    scale enters its own branches, only the factor of its other producers is consistent. Classes that are not in
    `rescaled` take the factor of their input.
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
        result = None
        for layer in producers.get(scale, []):
            of_input = factor(layer.scale_in)
            if of_input is not None:
                result = of_input * (wanted[layer.weight] if scale in rescaled else 1.0)
                break
        visiting.discard(scale)
        if result is None and visiting:
            return None
        known[scale] = 1.0 if result is None else result
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
    """Factor on the gradient of each rescaled parameter: 1 / c for w' = c w at the same loss.

    If the multiplier becomes q times as large, whose square divides the gradient, it is 1 / (c q^2).
    """
    averages = (name for norm in graph.norms for name in (norm.running_mean, norm.running_var))
    statistics = {name for name in averages if name is not None and name in tensors}
    # Scalars in place of tensors, since only their factors are needed.
    ones = {**scalars(tensors), **{name: tensors[name] for name in statistics}}
    factors, _ = rescale(graph, ones, classes, stored)
    scales = {name: 1.0 / factor for name, factor in factors.items() if name not in statistics}
    for name, multiplier in multipliers.items():
        scales[name] = scales.get(name, ones[name]) / multiplier**2
    return scales
