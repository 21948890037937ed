"""Experiment files of a plan's arms: the full network, the smaller one that never grows, the one that grows."""

import copy
import shlex
from collections.abc import Mapping
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import yaml
from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from growlab.base.files import write_text
from growlab.lab.planner.problem import WHOLE, Candidate
from growlab.lab.planner.search import Planned
from growlab.lab.planner.verdict import Verdict
from growlab.lab.training.checkpoints import save
from growlab.lab.training.configuration import PRIMARY
from growlab.lab.training.warm_start import OPTIMIZER

# Epochs that the shortest run has at least, so that stages end where they are meant to.
_LEAST_EPOCHS = 10
# Groups that an experiment file does not choose.
_NOT_CHOSEN = ("experiment", "method", "plan", "parts")
_NOT_KEPT = ("name", "plan", "ckpt_path", "study")
# The least that a small stage costs which goes on from a probe, in parts of the budget.
_LEAST_STAGE = 0.01
# What a probe has done already.
_NOT_WARMED = {"schedule.learning_rate.warmup_epochs": 0, "schedule.learning_rate.warmup_fraction": 0.0}
# How long a run is, and when it grows, is what a plan says.
_UNSAID = ("epochs", "widths", "batch_sizes", "initial_epochs", "demand", "width_growth_rate")


def write_experiments(
    folder: Path, cfg: DictConfig, data: Any, planned: Planned, candidates: Mapping[str, Candidate]
) -> str:
    """Write `experiment/{planned,full,smaller,grown}.yaml`, each to be run as it is, and what they start from.

    Args:
        folder: the plan's; `--config-dir` of runs.
        cfg: the configuration that was planned for.
        data: set up.
        planned: what came out.
        candidates: by name.

    Returns:
        The command that trains what the verdict says.
    """
    verdict = planned.verdict
    arms = {WHOLE: _full()}
    staying = _staying(verdict)
    if staying is not None:
        arms["smaller"] = _smaller(candidates[staying])
    if verdict.growing:
        best = verdict.growing[0]
        begun = _begun(planned, best.candidate)
        share = _share(max(best.guess - begun, _LEAST_STAGE), 1.0 - best.guess, planned.flops[best.candidate])
        arms["grown"] = _grown(candidates[best.candidate], share)
    named = {WHOLE: WHOLE, "smaller": staying or WHOLE}
    named["grown"] = verdict.growing[0].candidate if verdict.growing else WHOLE
    chosen = {"grow": "grown", "smaller": "smaller", "full": WHOLE}[verdict.kind]
    command = f"python -m growlab --config-dir {shlex.quote(str(folder))} experiment="
    texts = {}
    for arm, settings in arms.items():
        common = _common(cfg, data, planned, named[arm])
        if planned.settings.start:
            start = folder.resolve() / "start" / f"{named[arm]}.pt"
            common |= {"start_from": str(start), **_NOT_WARMED}
            start.parent.mkdir(exist_ok=True)
            weights, optimizer = planned.starts[named[arm]]
            save(start, {"state_dict": weights, OPTIMIZER: optimizer})
        texts[arm] = _text(cfg, {**common, **settings}, f"{command}{arm}")
    texts["planned"] = texts[chosen].replace(f"{command}{chosen}", f"{command}planned")
    for arm, text in texts.items():
        write_text(folder / "experiment" / f"{arm}.yaml", text)
    return f"{command}planned"


def _staying(verdict: Verdict) -> str | None:
    """The candidate of the arm that never grows: the verdict's, or the likeliest one."""
    if verdict.kind == "smaller":
        return verdict.candidate
    return verdict.smaller[0].candidate if verdict.smaller else None


def _share(small: float, whole: float, flops: float) -> float:
    """Part of the epochs that is trained small, where small epochs of relative FLOPs and whole ones cost so much."""
    return small / flops / (small / flops + whole)


def _begun(planned: Planned, name: str) -> float:
    """Part of the budget that the probe has done of a candidate's run which starts from it."""
    return planned.measured[name].cost[-1] if planned.settings.start else 0.0


def _common(cfg: DictConfig, data: Any, planned: Planned, name: str) -> dict[str, Any]:
    """Settings of the arm of a candidate: equal cost, a rate clocked by it, and epochs short enough."""
    # With `charge` all probing is off the budget already, this candidate's too.
    whole = cfg.schedule.budget * min(planned.budget, 1.0 - _begun(planned, name))
    rate = planned.rates[name]
    settings: dict[str, Any] = {
        "schedule.budget": _rounded(whole),
        "schedule.equal_flops": False,
        **{f"schedule.{name}": None for name in _UNSAID},
        "optimizer.lr": _rounded(cfg.optimizer.lr * rate),
    }
    if cfg.schedule.learning_rate.clock != "cost":
        settings |= {
            "schedule.learning_rate.shape": "wsd",
            "schedule.learning_rate.clock": "cost",
            "schedule.learning_rate.decay_fraction": 0.5,
            "schedule.learning_rate.restarts": "none",
            "schedule.learning_rate.warmup_epochs": 0,
            "schedule.learning_rate.warmup_steps": None,
            "schedule.learning_rate.warmup_fraction": _rounded(
                min(0.4, cfg.schedule.learning_rate.warmup_epochs / whole)
            ),
        }
    if "epoch_parts" in cfg.data:
        batches = -(-data.num_train // data.batch_size)
        settings["data.epoch_parts"] = min(batches, max(cfg.data.epoch_parts, ceil(_LEAST_EPOCHS / whole)))
    return settings


def _full() -> dict[str, Any]:
    return {"/growth": "none", "/lr_adapt": "none"}


def _smaller(candidate: Candidate) -> dict[str, Any]:
    multiples = {"growth.width_multiple": candidate.width, "growth.depth_multiple": candidate.depth}
    return {"/growth": "none", "/lr_adapt": "none", **multiples, **_flat(candidate.settings)}


def _grown(candidate: Candidate, share: float) -> dict[str, Any]:
    fixed = HydraConfig.get().runtime.choices["growth"] == "none"
    return {
        **({"/growth": "pairs", "/lr_adapt": "none"} if fixed else {}),
        "schedule.num_stages": 2,
        "schedule.initial_width": candidate.width,
        "schedule.initial_fraction": _rounded(share),
        **_flat(candidate.settings),
    }


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _text(cfg: DictConfig, settings: Mapping[str, Any], command: str) -> str:
    """The experiment file: the groups' choices, and every value that is not theirs already."""
    choices = {
        group: choice
        for group, choice in HydraConfig.get().runtime.choices.items()
        if "/" not in group and "@" not in group and group not in _NOT_CHOSEN and choice is not None
    }
    replaced = {key[1:]: value for key, value in settings.items() if key.startswith("/")}
    choices = {group: str(replaced.get(group, choice)) for group, choice in choices.items()}
    base = compose(PRIMARY, ["~experiment", *(f"{group}={choice}" for group, choice in choices.items())])
    target = OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)
    known = OmegaConf.to_container(base, resolve=False, enum_to_str=True)
    for group, choice in replaced.items():
        if HydraConfig.get().runtime.choices[group] != choice:
            target[group] = copy.deepcopy(known[group])
    for key, value in settings.items():
        if not key.startswith("/"):
            *parents, last = key.split(".")
            branch = target
            for parent in parents:
                branch = branch.setdefault(parent, {})
            branch[last] = value
    values = {key: value for key, value in _different(target, known).items() if key not in _NOT_KEPT}
    defaults = [{f"override /{group}": choice} for group, choice in choices.items()]
    return (
        "# @package _global_\n"
        "# Written by growlab.lab.planner for this network, data and budget.\n"
        f"# Command:  {command}\n"
        + yaml.safe_dump({"defaults": defaults}, sort_keys=False)
        + "\n"
        + yaml.safe_dump(values, sort_keys=False)
    )


def _different(target: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of nested containers that another does not have alike."""
    found: dict[str, Any] = {}
    for key, value in target.items():
        if key in known and isinstance(value, Mapping) and isinstance(known[key], Mapping):
            inner = _different(value, known[key])
            if inner:
                found[key] = inner
        elif key not in known or known[key] != value:
            found[key] = value
    return found


def _rounded(number: float) -> float:
    """Four digits: nobody wants to read more of them."""
    return float(Fraction(f"{float(number):.4g}"))
