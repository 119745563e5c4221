"""Settings with constants that no user sets."""

from typing import Any, TypeVar

from rollout.config.section import SettingsSection

Group = TypeVar("Group", bound=SettingsSection)


def settings_of(group: type[Group], **fields: Any) -> Group:
    """A group of settings; fields that are constants of the group (`group.constants`) are set there."""
    names = type(group().constants).model_fields  # type: ignore[attr-defined]
    constants = {name: fields.pop(name) for name in list(fields) if name in names}
    return group(**fields, constants=constants)  # type: ignore[call-arg]
