"""The commands that install optional packages: the extras of pyproject.toml, as messages name them."""


def install(*extras: str) -> str:
    """The commands that install extras of this distribution: in a clone, and from a package index."""
    names = ",".join(extras)
    return f"`pip install '.[{names}]'` in a clone, or `pip install 'rollout-engine[{names}]'` from a package index"
