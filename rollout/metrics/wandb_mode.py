"""Whether a W&B run is online: only if credentials are configured, and without a prompt.

This reads the places in which W&B itself looks for credentials. Its own look-up would prompt on a terminal if it found
none.
"""

import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")
_DEFAULT_SERVER = "https://api.wandb.ai"


def wandb_mode(environ: Mapping[str, str]) -> str:
    """`WANDB_MODE` if it is set; else `online` if there is a key for the server; else `offline`.

    Raises:
        ValueError: `WANDB_MODE` is not one of W&B's modes.
    """
    chosen = environ.get("WANDB_MODE")
    if chosen:
        if chosen not in MODES:
            raise ValueError(f"WANDB_MODE is {chosen!r}; set it to one of {', '.join(MODES)}, or unset it")
        return chosen
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return "online"
    return "online" if _netrc_has_key(environ) else "offline"


def _netrc_has_key(environ: Mapping[str, str]) -> bool:
    server = urlsplit(environ.get("WANDB_BASE_URL") or _DEFAULT_SERVER).netloc
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    candidates = [Path(environ["NETRC"])] if environ.get("NETRC") else [home / ".netrc", home / "_netrc"]
    for path in candidates:
        try:
            entry = netrc.netrc(str(path)).hosts.get(server)
        except (OSError, netrc.NetrcParseError):
            continue
        if entry is not None and entry[2]:
            return True
    return False
