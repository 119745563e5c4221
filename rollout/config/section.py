"""The base of all groups of settings."""

from pydantic import BaseModel, ConfigDict


class SettingsSection(BaseModel):
    """A group of settings: immutable, and an undeclared key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
