"""Find the class of a run's environment and check it before anything starts."""

from __future__ import annotations

from typing import Any

from relax_actors.config.environment import EnvironmentSection
from relax_actors.envs.environment import Environment
from relax_actors.errors import ConfigError
from relax_actors.registry.catalog import ENVIRONMENTS
from relax_actors.registry.options import checked_options

SETTING, OPTIONS = "environment.name", "environment.options"


def load_environment(section: EnvironmentSection, *, hosted: bool = True) -> tuple[type[Environment], dict[str, Any]]:
    """Return the class of an environment and the values of its options.

    Unless this machine is to host sessions (`hosted`), the sandbox and other requirements are not checked.

    Raises:
        ConfigError: the class does not import or is no environment, a package that it needs is missing, or an option is
            unknown, missing or of the wrong type.
    """
    cls = ENVIRONMENTS.load(section.name, SETTING)
    where = f"{SETTING} = {section.name!r}"
    if not (isinstance(cls, type) and issubclass(cls, Environment)):
        msg = f"{where} names {cls!r:.80}, which is no subclass of relax_actors.envs.Environment; write "
        raise ConfigError(msg + "`class <Name>(Environment):`")
    if missing := [name for name in ("reset", "step") if getattr(cls, name) is getattr(Environment, name)]:
        msg = f"{where}: {cls.__name__} does not define {' and '.join(missing)}"
        raise ConfigError(msg)
    if "state" in vars(cls) and cls.restore is Environment.restore:
        msg = f"{where}: {cls.__name__} defines state without restore; define both, or neither to have actions replayed"
        raise ConfigError(msg)
    if cls.__init__ is not object.__init__ and cls.build.__func__ is Environment.build.__func__:  # type: ignore[attr-defined]
        cls.build(section.options, OPTIONS)  # a constructor with arguments fails here
    values = checked_options(cls, Environment, section.options, OPTIONS)
    if hosted:
        cls.check_options(values)
    return cls, values


def make_environment(cls: type[Environment], values: dict[str, Any]) -> Environment:
    """Create an instance with checked options."""
    made = cls()
    for name, value in values.items():
        setattr(made, name, value)
    return made
