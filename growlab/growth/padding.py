"""Keep the padding rows of embedding tables at zero, which torch never trains."""

from collections.abc import Mapping

from torch import Tensor, nn


def padding_kept(model: nn.Module, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the new tensors with padding rows set to zero where they were zero before.

    No gradient reaches such a row, so entries that an event drew there would stay in the network as noise. A row that
    is not zero (it is trained if the table is tied to an output layer) is left unchanged.

    Args:
        model: the network, at its old or its new widths.
        old: its tensors before the event, by name.
        new: tensors that will replace them or be added to them, by name.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = dict(new)
    for module in model.modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.padding_idx is None:
            continue
        name = names.get(id(module.weight), "")
        if name in new and new[name] is not old[name] and not bool(old[name][module.padding_idx].any()):
            kept[name] = new[name].detach().clone()
            kept[name][module.padding_idx] = 0
    return kept
