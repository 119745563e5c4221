"""A conversation with a real small model: each answer is streamed, and its turns share one KV cache.

Two ways to run it:

    make demo-chat                                     # fetches the model once, and asks three questions
    python -m scripts.demo_chat "Name three colours."  # your own questions, one turn each
"""

import argparse
import sys
from typing import Any

from scripts.fetch_smollm2 import FOLDER
from trainer_bridge import RolloutClient, start_worker

QUESTIONS = ("What is the capital of France?", "And of Italy?", "Which of the two is larger?")


def converse(client: RolloutClient, questions: list[str]) -> None:
    """Ask the questions in turn, and print each answer while it is written."""
    messages: list[dict[str, Any]] = []
    for question in questions:
        print(f"\n> {question}")
        messages.append({"role": "user", "content": question})
        stream = client.generate(
            messages=messages, session="demo", max_tokens=200, temperature=0.0, stream="tokens", return_text=True
        )
        for chunk in stream:
            print(chunk.text, end="", flush=True)
        answer = stream.result
        messages.append({"role": "assistant", "content": answer.completions[0].text})
        new = answer.prompt_tokens - answer.cached_tokens
        tokens = len(answer.completions[0].token_ids)
        print(f"\n[{answer.prompt_tokens} tokens of prompt, {new} of them new; {tokens} tokens of answer]")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=QUESTIONS, help="one turn each")
    parser.add_argument("--model", default=FOLDER, help="a model's folder (%(default)s)")
    arguments = parser.parse_args()
    if arguments.model == FOLDER and not FOLDER.is_dir():
        sys.exit(f"{FOLDER} is not there: run `python -m scripts.fetch_smollm2` first")
    with start_worker(arguments.model, max_rows=4) as worker, RolloutClient(worker.endpoint) as client:
        converse(client, arguments.questions)


if __name__ == "__main__":
    main()
