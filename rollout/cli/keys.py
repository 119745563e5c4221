"""`rollout keys DIR`: the CURVE keys of a worker and its clients, as files.

DIR/server.key_secret      for workers: --curve-secret-key
DIR/server.key             for every client
DIR/clients/NAME.key       for workers: --curve-client-keys DIR/clients
DIR/NAME.key_secret        for that client alone
"""

import argparse
from pathlib import Path

from rollout.cli.parser import CommandError, UsageError

_SERVER = "server"
_CLIENTS_FOLDER = "clients"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make CURVE keys: a pair for workers, unless the folder has one, and a pair for each client. Existing keys are "
        "never overwritten."
    )
    parser.add_argument("folder", metavar="DIR", help="folder for the files; created if missing")
    parser.add_argument(
        "--client", metavar="NAME", action="append", help="name of a client to make keys for; repeatable [client]"
    )


def run(args: argparse.Namespace) -> int:
    """Make the files and print the commands that use them."""
    from trainer_bridge.wire.keys import PUBLIC_SUFFIX, SECRET_SUFFIX, make_pair

    folder = Path(args.folder)
    clients = folder / _CLIENTS_FOLDER
    names = args.client or ["client"]
    if _SERVER in names or len(set(names)) != len(names):
        raise UsageError(f"--client: give each client a different name, and none the name {_SERVER}")
    secret, public = folder / f"{_SERVER}{SECRET_SUFFIX}", folder / f"{_SERVER}{PUBLIC_SUFFIX}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        clients.mkdir(mode=0o755, exist_ok=True)
        if not (secret.exists() and public.exists()):
            make_pair(folder, _SERVER)
        taken = [name for name in names if (folder / f"{name}{SECRET_SUFFIX}").exists()]
        if taken:
            raise FileExistsError(f"{folder} already has keys of {', '.join(taken)}; choose another name or folder")
        made = [make_pair(folder, name, clients)[0] for name in names]
    except ValueError as error:
        raise UsageError(str(error)) from error
    except FileExistsError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"cannot write keys to {folder}: {error.strerror}") from error
    print(f"worker:  rollout serve MODEL --curve-secret-key {secret} --curve-client-keys {clients}")
    for file in made:
        print(f"client:  rollout status ENDPOINT --curve-key {file} --curve-server-key {public}")
    return 0
