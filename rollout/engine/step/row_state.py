"""The state of the rows on the device.

    ints    [rows, I]  int64     last token, length (tokens whose KV is written), prompt length, min_tokens, offset
                                 of positions in rotary embeddings (0 without images); a column for each sampling rule
                                 that is an integer (`INT_RULES`); seed
    floats  [rows, F]  float32   temperature, noise (1 draws, 0 takes the best); a column for each other sampling rule
                                 (`FLOAT_RULES`)
    pages   [rows, P]  int32     page table; entries past a row's pages are the dump page
    step_*  [rows, P]  int32     page table of the running decode step, in its order; on a GPU, where it is written in
                                 place. Entries past a row's context are left from earlier steps
    counts  [rows, V]  int32     occurrences of each token, for penalties
    bias_*  [rows, K]            logit bias, padded with id 0 and bias 0
    banned  [rows, K]            stop ids, padded by repeating the first; banned until min_tokens
    columns [rows]     int32     of features, by name

Row 0 is padding. The last rows are for tokens ahead: for one step such a row is a copy of a sequence's row, some
tokens ahead, and its last token is one of the tokens ahead (`features/drafts`). A sequence's first step sets its row up
from the `init_*` and list sections of the upload (`pack.py`); after that the device keeps the row current. Everything
here runs on the compute stream.
"""

from collections.abc import Sequence as Seq

import torch

from rollout.engine.messages.requests import MAX_LOGIT_BIAS, MAX_STOP_IDS
from rollout.engine.upload import StepInput
from trainer_bridge.wire.sampling_rules import RULES

#: The sampling rules with a column in `ints` or in `floats`, in the order of their columns. The temperature and the
#: noise have columns of their own: the draw itself needs them.
INT_RULES = tuple(rule for rule in RULES if rule.kind is int)
FLOAT_RULES = tuple(rule for rule in RULES if rule.kind is float and rule.part != "temperature")

LAST, LENGTH, PROMPT, MIN_TOKENS, ROPE_DELTA, FIRST_INT_RULE = range(6)
SEED = FIRST_INT_RULE + len(INT_RULES)
INTS = SEED + 1  # columns
TEMPERATURE, NOISE, FIRST_FLOAT_RULE = range(3)
FLOATS = FIRST_FLOAT_RULE + len(FLOAT_RULES)  # columns


class RowState:
    """Device tensors indexed by row."""

    def __init__(
        self,
        max_rows: int,
        max_pages: int,
        vocab: int,
        device: torch.device,
        columns: Seq[str] = (),
    ) -> None:
        """State of `max_rows` rows, rows of tokens ahead included, and of the padding; `columns` belong to features.

        One column at most: the kernel that sets up rows of tokens ahead copies one. Raises ValueError for more.
        """
        if len(columns) > 1:
            names = " and ".join(columns)
            raise ValueError(f"only one feature can have a column of the row state (`row_column`), and {names} do")
        rows = max_rows + 1
        self.vocab = vocab
        self.ints = torch.zeros(rows, INTS, dtype=torch.int64, device=device)
        self.floats = torch.ones(rows, FLOATS, device=device)
        self.pages = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)
        self.counts = torch.zeros(rows, vocab, dtype=torch.int32, device=device)
        self.bias_ids = torch.zeros(rows, MAX_LOGIT_BIAS, dtype=torch.int64, device=device)
        self.bias = torch.zeros(rows, MAX_LOGIT_BIAS, device=device)
        self.banned = torch.zeros(rows, MAX_STOP_IDS, dtype=torch.int64, device=device)
        self.columns = {name: torch.zeros(rows, dtype=torch.int32, device=device) for name in columns}
        on_gpu = device.type == "cuda"
        self.step_pages = torch.zeros(max_rows, max_pages, dtype=torch.int32, device=device) if on_gpu else None

    @staticmethod
    def nbytes(max_rows: int, max_pages: int, vocab: int) -> int:
        """Device memory of the state, bytes."""
        a_row = INTS * 8 + FLOATS * 4 + 2 * 4 * max_pages + 4 * vocab + (8 + 4) * MAX_LOGIT_BIAS + 8 * MAX_STOP_IDS
        return (max_rows + 1) * a_row

    def clear_padding(self) -> None:
        """Reset row 0 to padding after it was used as a row that samples."""
        for state in (self.ints, self.counts, self.pages, *self.columns.values()):
            state[0] = 0

    def set_up(self, step: StepInput) -> None:
        """Set up the rows that this step starts."""
        if "init_ints" not in step:
            return
        records = step["init_ints"]
        rows = records[:, 0]
        self.ints.index_copy_(0, rows, records[:, 1:])
        self.floats.index_copy_(0, rows, step["init_floats"])
        self.pages.index_fill_(0, rows, 0)
        for name, column in self.columns.items():
            column.index_copy_(0, rows, step[f"init_{name}"])
        row, column, page = step["page_updates"].long().unbind(1)
        self.pages.index_put_((row, column), page.int())
        self.bias.index_fill_(0, rows, 0.0)  # one biased row makes a step read the bias of all its rows
        if "banned" in step:
            self.banned.index_copy_(0, step["banned_rows"], step["banned"])
        if "bias_ids" in step:
            self.bias_ids.index_copy_(0, step["bias_rows"], step["bias_ids"])
            self.bias.index_copy_(0, step["bias_rows"], step["bias"])
        if "counts" in step:
            self.counts.index_fill_(0, step["counts_rows"], 0)
            row, token, amount = step["counts"].long().unbind(1)
            self.counts.index_put_((row, token), amount.int(), accumulate=True)

    def take_known(self, known_N3: torch.Tensor) -> None:
        """Have rows of a decode forward take tokens that the host knows: row, token, position; int64."""
        rows_N, tokens_N, positions_N = known_N3.unbind(1)
        self.ints[rows_N, LAST] = tokens_N
        self.ints[rows_N, LENGTH] = positions_N
