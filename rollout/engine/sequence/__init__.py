"""The host's data of one sequence: its tokens, KV, experts, group and session, as plain data."""
