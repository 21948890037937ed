"""The form of `results.json`: which fields are read, and of what kind each is."""

from collections.abc import Iterator, Mapping
from typing import Any

from growlab.lab.analysis.metrics import ACCURACY, BITS, BLEU

Kinds = tuple[type, ...]

_NUMBER: Kinds = (int, float)
_MAYBE_NUMBER: Kinds = (*_NUMBER, type(None))
_MAYBE_MAPPING: Kinds = (dict, type(None))
_MAYBE_LIST: Kinds = (list, type(None))
_REQUIRED: dict[str, Kinds] = {
    "model": (str,),
    "data": (str,),
    "growth": (str,),
    "lr_adapt": (str,),
    "seed": (int,),
    "epochs": (int,),
    "train_cost_percent": _MAYBE_NUMBER,
    "test_loss": _MAYBE_NUMBER,
    "seconds": _MAYBE_NUMBER,
}
# Those that older runs may lack.
_OPTIONAL: dict[str, Kinds] = {
    "reference_epochs": _MAYBE_NUMBER,
    "parity_max_error": _MAYBE_NUMBER,
    "overrides": _MAYBE_LIST,
    "stages": _MAYBE_LIST,
    "schedule": _MAYBE_MAPPING,
    "metric": _MAYBE_MAPPING,
    "machine": _MAYBE_MAPPING,
    "versions": _MAYBE_MAPPING,
}
_METRIC: dict[str, Kinds] = {"name": (str,), "higher_is_better": (bool,)}
_SCHEDULE: dict[str, Kinds] = {
    "budget": _MAYBE_NUMBER,
    "epochs": _MAYBE_LIST,
    "widths": _MAYBE_LIST,
    "learning_rate": _MAYBE_MAPPING,
}
_STAGE: dict[str, Kinds] = {
    "epochs": (int,),
    "batch_size": (int,),
    "seconds": _NUMBER,
    "samples_per_sec": _NUMBER,
}
_STAGE_OPTIONAL: dict[str, Kinds] = {
    "stage": (int,),
    "num_params": (int,),
    "flops_per_sample": _MAYBE_NUMBER,
    "peak_memory_bytes": _MAYBE_NUMBER,
    "widths": _MAYBE_MAPPING,
}


def check_form(content: Any) -> dict[str, Any]:
    """Return the content of a `results.json` if it is a run's.

    Raises:
        ValueError: it is not; the message is half a sentence.
    """
    if not isinstance(content, dict):
        raise ValueError("it is not the result of a growlab run.")
    wrong = next(_wrong(content), None)
    if wrong is not None:
        raise ValueError(f"it is not the result of a growlab run ({wrong} is missing or of another kind).")
    return content


def _wrong(content: Mapping[str, Any]) -> Iterator[str]:
    """Full names of fields that cannot be read."""
    yield from _unfit(content, _REQUIRED)
    yield from _unfit(content, _OPTIONAL, may_lack=True)
    if content["epochs"] < 1:
        yield "epochs"
    if content.get("metric"):
        yield from _unfit(content["metric"], _METRIC, "metric.")
    names = {ACCURACY.key, BLEU.key, BITS.key, (content.get("metric") or {}).get("name")}
    scores = {f"test_{name}": _MAYBE_NUMBER for name in sorted(filter(None, names))}
    yield from _unfit(content, scores, may_lack=True)
    yield from _unfit(content.get("schedule") or {}, _SCHEDULE, "schedule.", may_lack=True)
    for index, stage in enumerate(content.get("stages") or ()):
        name = f"stages[{index}]"
        if not isinstance(stage, dict):
            yield name
        yield from _unfit(stage, _STAGE, f"{name}.")
        yield from _unfit(stage, _STAGE_OPTIONAL, f"{name}.", may_lack=True)


def _unfit(
    content: Mapping[str, Any], kinds: Mapping[str, Kinds], prefix: str = "", may_lack: bool = False
) -> Iterator[str]:
    for key, allowed in kinds.items():
        if key not in content and may_lack:
            continue
        value = content.get(key, ...)
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            yield prefix + key
