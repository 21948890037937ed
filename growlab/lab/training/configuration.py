"""Find the configuration and register its schemas with Hydra."""

from pathlib import Path

from growlab.base.errors import UserError

PRIMARY = "config"
"""Name of the primary configuration: `conf/config.yaml`."""

SEARCHPATH = "hydra.searchpath"
"""The override that names more folders of configurations."""


def config_dir(package: Path | None = None) -> Path:
    """Absolute path of `conf/`: inside the package in a wheel, next to it in a checkout or editable install.

    Args:
        package: folder of the growlab package; found from this file if None.

    Raises:
        UserError: there is no `config.yaml` in either place.
    """
    package = Path(__file__).resolve().parents[2] if package is None else package.resolve()
    places = (package / "conf", package.parent / "conf")
    for place in places:
        if (place / f"{PRIMARY}.yaml").is_file():
            return place
    raise UserError(
        f"no {PRIMARY}.yaml in {places[0]} or {places[1]}: install growlab anew, in a checkout with "
        "`pip install -e .`"
    )


def register_schemas() -> None:
    """Store growlab's structured configs, so that composing checks keys and types against them.

    They are what `growlab.lab.training.configs.register` puts into Hydra's ConfigStore. To be called before composing;
    calling it again changes nothing. The import is here so that `config_dir` needs no Hydra.
    """
    from growlab.lab.training import configs

    configs.register(config_dir())


def search_options() -> list[str]:
    """Options with which another command finds this job's configuration, if it is not in `conf/` alone.

    Returns:
        `--config-name`, `--config-dir` and `hydra.searchpath` as they were given; they go before overrides.
    """
    from hydra.core.hydra_config import HydraConfig

    job = HydraConfig.get()
    options = [] if job.job.config_name == PRIMARY else ["--config-name", job.job.config_name]
    for source in job.runtime.config_sources:
        if source.provider == "command-line":
            options += ["--config-dir", source.path]
    return [*options, *(one for one in job.overrides.hydra if one.lstrip("+").startswith(f"{SEARCHPATH}="))]
