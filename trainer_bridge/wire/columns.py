"""The columns of a completion in messages: an entry or a row for each token, and marks at some of the tokens."""

import numpy as np

#: Every completion and chunk has these, 1-D; a `chunks` reply has them for all its chunks.
TOKEN_COLUMNS = {"token_ids": np.int32, "logprobs": np.float32, "raw_logprobs": np.float32}
#: Likeliest tokens, [tokens, k].
TOP_COLUMNS = {"top_ids": np.int32, "top_logprobs": np.float32}
#: All columns with their dtypes.
COLUMNS = {**TOKEN_COLUMNS, "drawn_logprobs": np.float32, **TOP_COLUMNS}
#: The value of unknown entries.
UNKNOWN = {"top_ids": -1, "top_logprobs": np.nan}
#: Lists of tuples, and the numbers in each.
MARKS = {
    **dict.fromkeys(("recomputed", "adapter_versions"), ("position", "version")),
    "kv_versions": ("position", "version", "tokens"),
}
