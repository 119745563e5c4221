"""CURVE keys in files, and how a client's socket uses them.

    NAME.key           a public key; not secret
    NAME.key_secret    the pair; readable by its owner only

The format is the one of ZeroMQ's own certificate tools (ZPL), so files of either work in both. Nothing that exists is
ever overwritten. Needs ZeroMQ only.
"""

import logging
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import zmq

PUBLIC_SUFFIX = ".key"
SECRET_SUFFIX = ".key_secret"

_MAX_FILE_BYTES = 1 << 16
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
#: A key is 32 bytes in Z85: 40 of these characters.
_KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_LINE = re.compile(rb'^[ \t]*(public|secret)-key[ \t]*=[ \t]*"([^"\n]*)"[ \t]*$', re.MULTILINE)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public and a secret key, both as 40 Z85 characters."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClientCurve:
    """A client's keys for workers that use CURVE."""

    keys: KeyPair
    server_public: bytes

    @classmethod
    def from_files(cls, secret_file: str | os.PathLike[str], server_file: str | os.PathLike[str]) -> Self:
        """Read the client's `NAME.key_secret` and the workers' `server.key`."""
        return cls(read_pair(secret_file), read_public(server_file))

    def apply(self, socket: zmq.Socket) -> None:
        """Have a socket use the keys; call it before `connect`."""
        socket.curve_serverkey = self.server_public
        socket.curve_publickey = self.keys.public
        socket.curve_secretkey = self.keys.secret


def make_pair(folder: Path, name: str, public_folder: Path | None = None) -> tuple[Path, Path]:
    """Make a new key pair: the paths of `folder`/NAME.key_secret (mode 0600) and of NAME.key.

    The public file goes to `public_folder` when that is given. Raises ValueError for a name that is no plain file
    name, FileExistsError when one of the files is there already.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a key; use up to 64 letters, digits, dots, dashes and underscores")
    secret_file = folder / f"{name}{SECRET_SUFFIX}"
    public_file = (public_folder or folder) / f"{name}{PUBLIC_SUFFIX}"
    for file in (secret_file, public_file):
        if file.exists() or file.is_symlink():
            raise FileExistsError(f"{file} exists already; keys are never overwritten")
    public, secret = zmq.curve_keypair()
    _write_new(secret_file, 0o600, f"# Keep this file secret.\n{_text(public, secret)}")
    _write_new(public_file, 0o644, _text(public))
    return secret_file, public_file


def read_public(file: str | os.PathLike[str]) -> bytes:
    """The public key in a file of either kind. Raises ValueError for a file that cannot be read or holds none."""
    return _key(Path(file), _read(Path(file)), b"public")


def read_pair(file: str | os.PathLike[str]) -> KeyPair:
    """The pair in a NAME.key_secret file; warns if others may read it. Raises ValueError for any other file."""
    path = Path(file)
    content = _read(path)
    pair = KeyPair(_key(path, content, b"public"), _key(path, content, b"secret"))
    if zmq.curve_public(pair.secret) != pair.public:
        raise ValueError(f"the two keys in {path} are not a pair; make new ones with `rollout keys`")
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        _log.warning("the secret key %s is open to other users; close it: chmod 600 %s", path, path)
    return pair


def _text(public: bytes, secret: bytes | None = None) -> str:
    lines = ["metadata", "curve", f'    public-key = "{public.decode()}"']
    if secret is not None:
        lines.append(f'    secret-key = "{secret.decode()}"')
    return "\n".join(lines) + "\n"


def _write_new(file: Path, mode: int, text: str) -> None:
    # O_EXCL: never overwrite a file that another process made. The mode is set before the first byte.
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w") as out:
        os.fchmod(descriptor, mode)  # whatever the umask
        out.write(text)


def _read(path: Path) -> bytes:
    try:
        if not path.exists():
            raise ValueError(f"the key file {path} does not exist; `rollout keys` makes key files")
        if not path.is_file():
            raise ValueError(f"{path} is not a key file; `rollout keys` makes key files")
        with path.open("rb") as source:
            content = source.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"the key file {path} cannot be read: {error.strerror}") from error
    if len(content) > _MAX_FILE_BYTES:
        raise ValueError(f"{path} is too large for a key file")
    return content


def _key(path: Path, content: bytes, kind: bytes) -> bytes:
    found = [value for name, value in _LINE.findall(content) if name == kind]
    if len(found) != 1 or not _KEY.fullmatch(found[0]):
        raise ValueError(f"{path} does not hold one {kind.decode()} key; `rollout keys` makes key files")
    return found[0]
