"""What speculation would have had accepted, counted on finished completions; needs no model and no GPU.

    python -m scripts.check.shadow_acceptance rollouts.jsonl --drafter suffix ngram --cost 8:0:4.1 --cost 8:3:4.3

Drafts are accepted only where they equal the token that was drawn, so finished completions say what `speculation =
suffix` and `ngram` would have had accepted. Drafts of a draft model depend on hidden states, which no completion has:
a worker with `speculation = auto` measures them.

The script plays completions again: all completions of a group begin together, and each step gives every unfinished one
its accepted drafts and one token more. --drafter says what drafts; each drafter plays all completions.
    suffix  the engine's own: it sees the prompt, the row itself, the other completions of the group as they grow, and
            earlier completions of the same prompt in the order of the input
    ngram   by the rule of the device: it sees the prompt and the row itself

Input, one or more of:
    a journal     of a client (`RolloutClient(journal=...)`), while no client has it open; it stays as it is. Its
                  finished requests count, and their prompts must have been sent as token ids
    *.jsonl       a map a line, with --prompt-field and --completion-field
    a folder      a Hugging Face dataset that `save_to_disk` wrote, with the same fields; needs the package `datasets`

A prompt is a list of token ids. A completion is such a list, a list of such lists, or a list of maps with `token_ids`;
one record with several completions is a group, and so are neighbouring records of one completion with the same prompt.

Output, for each drafter and k (drafts a step): drafted and accepted tokens, acceptance by place in the draft, tokens a
step, and the part of the accepted tokens that came from each source. --groups adds each group's tokens a step, --json
writes all of it.

--late is for suffix. 1 (default) is the host of a pipeline of two steps: the drafter does not see the tokens of the
step in flight, so its drafts also skip the place of a wrong draft. 0 is a pipeline of one step. N-grams
are found on the device, which knows each token at once: they are never late.

An engine differs at the end of a completion. It drafts beyond a stop, which it cannot foresee. In a pipeline of two
steps it counts drafts in flight towards `max_tokens`, so its steps in the last 2 k tokens have fewer drafts than here.

With a cost table the output says how much faster decoding would be on that GPU: tokens a step, times the cost of a
plain step over that of a verify step of as many rows. The costs are given as --cost ROWS:K:MS, or as --costs FILE: a
result of `scripts.bench.speculation`, or a list of {"rows", "k", "ms"}, which such a result has as `costs`.
It takes all rows to draft k tokens in all steps, so it is a lower bound where some draft less.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from rollout.engine.features.drafts.suffix_drafter import Match, SuffixDrafter
from scripts.bench.output import print_table, write_results
from trainer_bridge.client.journal import Journal
from trainer_bridge.wire.errors import JournalFailed


class InputError(ValueError):
    """The input cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Group:
    """Completions of one prompt that ran together."""

    prompt: np.ndarray  # int32
    completions: list[list[int]]


@dataclass(slots=True)
class Acceptance:
    """What drafts of up to `k` tokens came to, for one group or for several."""

    k: int
    steps: int = 0
    tokens: int = 0  # drawn by these steps
    drafted: list[int] = field(default_factory=list)  # by place in the draft
    accepted: list[int] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)  # of accepted tokens

    def __post_init__(self) -> None:
        self.drafted, self.accepted = self.drafted or [0] * self.k, self.accepted or [0] * self.k

    def __iadd__(self, other: Acceptance) -> Acceptance:
        self.steps, self.tokens = self.steps + other.steps, self.tokens + other.tokens
        self.drafted = [a + b for a, b in zip(self.drafted, other.drafted, strict=True)]
        self.accepted = [a + b for a, b in zip(self.accepted, other.accepted, strict=True)]
        self.sources += other.sources
        return self

    @property
    def tokens_a_step(self) -> float:
        """Mean accepted length, the token that every step gives included."""
        return self.tokens / self.steps if self.steps else 1.0

    def row(self) -> dict[str, Any]:
        """For a table."""
        drafted, accepted = sum(self.drafted), sum(self.accepted)
        row: dict[str, Any] = {"k": self.k, "tokens": self.tokens, "steps": self.steps, "drafted": drafted}
        row |= {"accepted": accepted, "accepted_pct": _percent(accepted, drafted), "tokens_a_step": self.tokens_a_step}
        row["by_place_pct"] = " ".join(
            f"{_percent(a, d):.0f}" for a, d in zip(self.accepted, self.drafted, strict=True)
        )
        return row

    def source_row(self) -> dict[str, Any]:
        """For a table: the share of the accepted tokens from each source, percent."""
        accepted = sum(self.accepted)
        return {"k": self.k} | {source: _percent(self.sources[source], accepted) for source in SOURCES}


#: Where a draft may come from.
SOURCES = ("prompt", "own", "group", "earlier")


class Cost(NamedTuple):
    """What a step of `rows` rows with `k` drafts each takes; `k` 0 is a plain step."""

    rows: int
    k: int
    ms: float


# --- drafters ---------------------------------------------------------------------------------------------------------


class PlayedDrafter(Protocol):
    """Drafts tokens of completions that are played again. `key` is one completion."""

    def matched_path(
        self, key: Hashable, prompt: np.ndarray, tokens: Sequence[int], want: int
    ) -> tuple[Match | None, list[int]]:
        """At most `want` tokens expected after prompt and `tokens`, which only grow; and the place that they follow."""

    def own_text(self, key: Hashable) -> int:
        """A completion's own text, as `Match.text` names it. Text 0 is the prompt."""

    def ended(self, key: Hashable) -> None:
        """Nothing is added to this completion any more."""


class NgramDrafter:
    """Drafts as the device does, by the rule in `rollout_kernels.step.ngrams`.

    Of a completion that has not ended, and of its prompt, a token takes about 1.2 KB.
    """

    def __init__(self, reach: int | None = None) -> None:
        from rollout_kernels.step import ngrams  # imports torch, which suffix matching does not need

        self._most_equal, self._reach = ngrams.MOST_EQUAL, ngrams.REACH if reach is None else reach
        self._rows: dict[Hashable, tuple[list[int], dict[tuple[int, ...], int]]] = {}

    def matched_path(
        self, key: Hashable, prompt: np.ndarray, tokens: Sequence[int], want: int
    ) -> tuple[Match | None, list[int]]:
        """As `PlayedDrafter.matched_path`. Where nothing is equal, it repeats the last token."""
        if key not in self._rows:
            self._rows[key] = [], {}
            self._add(key, prompt.tolist())
        text, newest = self._rows[key]
        self._add(key, tokens[len(text) - len(prompt) :])
        first = max(1, len(text) - self._reach)
        for equal in range(min(self._most_equal, len(text) - 1), 0, -1):
            place = newest.get(tuple(text[-equal:]), 0)
            if place >= first:
                break
        else:
            place, equal = len(text) - 1, 0
        path = [text[place + i % (len(text) - place)] for i in range(want)]
        return Match(0 if place < len(prompt) else self.own_text(key), place, equal), path

    def _add(self, key: Hashable, tokens: Sequence[int]) -> None:
        text, newest = self._rows[key]
        for token in tokens:
            for equal in range(1, min(self._most_equal, len(text)) + 1):
                newest[tuple(text[-equal:])] = len(text)  # where `token` follows
            text.append(token)

    def own_text(self, key: Hashable) -> int:
        """As `PlayedDrafter.own_text`."""
        return 1

    def ended(self, key: Hashable) -> None:
        """As `PlayedDrafter.ended`."""
        del self._rows[key]


#: By name: makes a drafter that keeps this number of tokens, if it keeps any.
DRAFTERS: dict[str, Callable[[int], PlayedDrafter]] = {"suffix": SuffixDrafter, "ngram": lambda _: NgramDrafter()}


# --- playing completions again ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Row:
    """A completion that is played again."""

    key: tuple[int, int]
    tokens: list[int]
    done: int = 1  # tokens drawn so far; the prefill drew the first one
    seen: int = 0  # how many of them the drafter sees


def play(groups: Iterable[Group], drafter: PlayedDrafter, k: int, late: int = 0) -> list[Acceptance]:
    """The acceptance of each group, in order, with drafts of up to `k` tokens by a new drafter."""
    return [_play_group(drafter, number, group, k, late) for number, group in enumerate(groups)]


def _play_group(drafter: PlayedDrafter, number: int, group: Group, k: int, late: int) -> Acceptance:
    found = Acceptance(k)
    rows = [_Row((number, i), tokens) for i, tokens in enumerate(group.completions)]
    siblings: set[int] = set()
    for row in rows:
        drafter.matched_path(row.key, group.prompt, [], 0)
        siblings.add(drafter.own_text(row.key))
    running = [row for row in rows if len(row.tokens) > 1]
    while running:
        for row in running:
            if not late:
                row.seen = row.done
            drawn = _step(drafter, row, group.prompt, siblings, found)
            row.seen = row.done  # when the step after the next one is planned
            row.done += drawn
        running = [row for row in running if row.done < len(row.tokens)]
    for row in rows:
        drafter.matched_path(row.key, group.prompt, row.tokens, 0)
        drafter.ended(row.key)
    return found


def _step(drafter: PlayedDrafter, row: _Row, prompt: np.ndarray, siblings: set[int], found: Acceptance) -> int:
    """One verify step of a row; returns the tokens that it draws."""
    unseen = row.done - row.seen
    match, path = drafter.matched_path(row.key, prompt, row.tokens[: row.seen], unseen + found.k)
    drafts = path[unseen : min(len(path), unseen + len(row.tokens) - row.done - 1)]
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == row.tokens[row.done + accepted]:
        accepted += 1
    for place in range(len(drafts)):
        found.drafted[place] += 1
        found.accepted[place] += place < accepted
    if accepted and match is not None:
        found.sources[_source(match, drafter.own_text(row.key), siblings)] += accepted
    found.steps += 1
    found.tokens += accepted + 1
    return accepted + 1


def _source(match: Match, own: int, siblings: set[int]) -> str:
    if match.text == 0:
        return "prompt"
    if match.text == own:
        return "own"
    return "group" if match.text in siblings else "earlier"


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else 0.0


# --- what it is worth -------------------------------------------------------------------------------------------------


def speedups(found: Sequence[Acceptance], costs: Sequence[Cost]) -> list[dict[str, Any]]:
    """How much faster decoding would be, for each cost of a verify step whose k was played."""
    for (rows, k), times in Counter((cost.rows, cost.k) for cost in costs).items():
        if times > 1:
            raise InputError(f"there are {times} costs of {rows} rows with k {k}: leave one")
    plain = {cost.rows: cost.ms for cost in costs if cost.k == 0}
    by_k = {acceptance.k: acceptance for acceptance in found}
    gains = []
    for cost in costs:
        if cost.k in by_k and cost.k:
            if cost.rows not in plain:
                raise InputError(f"the cost of a plain step (k 0) of {cost.rows} rows is missing")
            gain = by_k[cost.k].tokens_a_step * plain[cost.rows] / cost.ms
            gains.append(
                {"rows": cost.rows, "k": cost.k, "ms": cost.ms, "plain_ms": plain[cost.rows], "speed_up": gain}
            )
    return gains


def read_cost(text: str) -> Cost:
    """ROWS:K:MS. Raises InputError."""
    parts = text.split(":")
    try:
        (rows, k), (ms,) = map(int, parts[:2]), map(float, parts[2:])
    except ValueError:
        raise InputError(f"a cost is ROWS:K:MS, such as 8:3:4.3, and not {text!r}") from None
    return _checked(Cost(rows, k, ms), text)


def read_costs(path: Path) -> list[Cost]:
    """A JSON list of maps with rows, k and ms, or a map that has it as `costs`. Raises InputError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    entries = _json(text, str(path))
    if isinstance(entries, dict):
        entries = entries.get("costs")
    if not isinstance(entries, list):
        raise InputError(f"{path} is no list of costs")
    costs = []
    for entry in entries:
        if not isinstance(entry, dict) or set(entry) != {"rows", "k", "ms"}:
            raise InputError(f"{path}: a cost has the fields rows, k and ms, and not {entry!r}")
        if not all(type(entry[name]) is int for name in ("rows", "k")) or type(entry["ms"]) not in (int, float):
            raise InputError(f"{path}: rows and k are integers and ms is a number, and not {entry!r}")
        costs.append(_checked(Cost(entry["rows"], entry["k"], float(entry["ms"])), str(path)))
    return costs


def _checked(cost: Cost, where: str) -> Cost:
    if cost.rows < 1 or cost.k < 0 or not 0 < cost.ms < math.inf:
        raise InputError(f"{where}: a cost has at least one row, no negative k and a positive time, and not {cost}")
    return cost


# --- input ------------------------------------------------------------------------------------------------------------


def read_groups(path: Path, prompt_field: str, completion_field: str) -> Iterator[Group]:
    """The groups of a file or folder, in their order. Raises InputError."""
    if path.is_dir():
        records = _dataset(path)
    elif path.suffix == ".jsonl":
        records = _json_lines(path)
    else:
        yield from _journal(path)
        return
    waiting: Group | None = None  # neighbours of one completion each
    for number, record in enumerate(records, 1):
        where = f"record {number} of {path}"
        for name in (prompt_field, completion_field):
            if name not in record:
                raise InputError(f"{where} has no field {name!r}; its fields are {sorted(record)}")
        prompt = np.array(_token_ids(record[prompt_field], where, prompt_field), dtype=np.int32)
        completions, single = _completions(record[completion_field], where, completion_field)
        if single and waiting is not None and np.array_equal(waiting.prompt, prompt):
            waiting.completions.extend(completions)
            continue
        if waiting is not None:
            yield waiting
        waiting = Group(prompt, completions) if single else None
        if not single:
            yield Group(prompt, completions)
    if waiting is not None:
        yield waiting


def _completions(value: Any, where: str, name: str) -> tuple[list[list[int]], bool]:
    """The completions of a record, and whether it is one that may belong to a group of neighbours."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        lists = [each.get("token_ids") if isinstance(each, dict) else each for each in value]
        return [_token_ids(each, where, f"{name}.token_ids") for each in lists], False
    if isinstance(value, list) and value and isinstance(value[0], list):
        return [_token_ids(each, where, name) for each in value], False
    return [_token_ids(value, where, name)], True


def _token_ids(value: Any, where: str, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 2**24 for token in value):
        raise InputError(f"{where}: {name} is no list of token ids")
    return value


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.isspace():
                    continue
                record = _json(line, f"line {number} of {path}")
                if not isinstance(record, dict):
                    raise InputError(f"line {number} of {path} is no map")
                yield record
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers that are too long, and of too many brackets
        raise InputError(f"{where} is no JSON: {error}") from error


def _dataset(path: Path) -> Iterator[dict[str, Any]]:
    try:
        from datasets import Dataset, load_from_disk
    except ImportError as error:
        raise InputError("a folder is read as a Hugging Face dataset: install the package datasets") from error
    try:
        dataset = load_from_disk(str(path))
        for part in [dataset] if isinstance(dataset, Dataset) else dataset.values():
            yield from part.with_format(None)  # lists, whatever format it was saved with
    except FileNotFoundError as error:
        raise InputError(f"{path} holds no dataset that save_to_disk wrote") from error
    except Exception as error:  # it fails in many ways, and any exception is about this folder
        raise InputError(f"the dataset {path} cannot be read: {type(error).__name__}: {error!s:.300}") from error


def _journal(path: Path) -> Iterator[Group]:
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    journal = Journal(path, read_only=True)
    try:
        for request_id, finished in journal.ids().items():
            saved = journal.read(request_id) if finished else None
            if saved is None:
                continue
            prompt = saved.fields.get("prompt")
            if not isinstance(prompt, np.ndarray):
                raise InputError(f"request {request_id!r} of {path} has no token ids as its prompt")
            tokens: dict[int, list[int]] = {}
            for chunk in saved.chunks:
                tokens.setdefault(chunk.index, []).extend(chunk.token_ids.tolist())
            yield Group(prompt.astype(np.int32), [tokens[index] for index in sorted(tokens)])
    finally:
        journal.close()


# --- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", nargs="+", type=Path, help="journal, .jsonl file or folder of a dataset")
    parser.add_argument("--prompt-field", default="prompt_token_ids")
    parser.add_argument("--completion-field", default="completions")
    parser.add_argument(
        "--drafter", nargs="+", choices=DRAFTERS, default=["suffix"], help="what drafts; each plays alone"
    )
    parser.add_argument("--k", nargs="+", type=int, default=[1, 3, 7], help="drafts a step")
    late_help = "steps whose tokens suffix does not see (default 1); ngram is on the device and sees all"
    parser.add_argument("--late", type=int, choices=(0, 1), help=late_help)
    kept_help = "tokens of earlier prompts that suffix keeps"
    parser.add_argument("--kept-tokens", type=int, default=1_000_000, help=kept_help)
    parser.add_argument("--groups", action="store_true", help="print tokens a step of each group, too")
    parser.add_argument("--cost", action="append", default=[], help="ROWS:K:MS of a step; K 0 is a plain one")
    parser.add_argument(
        "--costs", type=Path, help="JSON file with a list of costs, or a result of scripts.bench.speculation"
    )
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args(argv)
    try:
        args.drafter, args.k = list(dict.fromkeys(args.drafter)), sorted(set(args.k))
        if args.k[0] < 1:
            raise InputError("--k is at least 1")
        if args.kept_tokens < 0:
            raise InputError("--kept-tokens is at least 0")
        if "suffix" not in args.drafter and args.late:
            raise InputError("--late 1 is for suffix: ngram drafts on the device, which knows each token at once")
        args.late = 1 if args.late is None else args.late
        costs = [read_cost(text) for text in args.cost]
        if strange := [cost.k for cost in costs if cost.k not in (0, *args.k)]:
            raise InputError(
                f"--cost has k {strange[0]}, and the completions are played with k {args.k}: add it to --k"
            )
        costs += [] if args.costs is None else read_costs(args.costs)
        groups = [group for path in args.input for group in read_groups(path, args.prompt_field, args.completion_field)]
        if not any(tokens for group in groups for tokens in group.completions):
            raise InputError("the input has no finished completion")
        plays = {name: _play_all(groups, name, args) for name in args.drafter}
        totals = {name: [_total(k, found) for k, found in by_k.items()] for name, by_k in plays.items()}
        gains = _named({name: speedups(each, costs) for name, each in totals.items()})
    except (InputError, JournalFailed) as error:
        print(error, file=sys.stderr)
        return 1
    rows = _named({name: [total.row() for total in each] for name, each in totals.items()})
    print_table(f"{len(groups)} groups" + f", suffix {args.late} step late" * ("suffix" in plays), rows)
    sources = _named({name: [total.source_row() for total in each] for name, each in totals.items()})
    print_table("sources of the accepted tokens, %", sources)
    by_group = _named({name: _group_rows(groups, by_k) for name, by_k in plays.items()})
    if args.groups:
        print_table("tokens a step by group", by_group)
    if gains:
        print_table("what it would be worth", gains)
    if args.json is not None:
        write_results(args.json, rows, groups=by_group, sources=sources, speed_ups=gains)
    return 0


def _play_all(groups: Sequence[Group], name: str, args: argparse.Namespace) -> dict[int, list[Acceptance]]:
    """By k: the acceptance of each group with a drafter."""
    late = args.late if name == "suffix" else 0
    return {k: play(groups, DRAFTERS[name](args.kept_tokens), k, late) for k in args.k}


def _group_rows(groups: Sequence[Group], by_k: dict[int, list[Acceptance]]) -> list[dict[str, Any]]:
    return [
        {"group": i, "completions": len(group.completions)} | {f"k={k}": by_k[k][i].tokens_a_step for k in by_k}
        for i, group in enumerate(groups)
    ]


def _named(rows: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """For a table: the rows of all drafters, by name."""
    return [{"drafter": name} | row for name, each in rows.items() for row in each]


def _total(k: int, found: Iterable[Acceptance]) -> Acceptance:
    total = Acceptance(k)
    for acceptance in found:
        total += acceptance
    return total


if __name__ == "__main__":
    sys.exit(main())
