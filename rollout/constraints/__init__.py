"""Constraints on the tokens of a completion, step by step.

- `constraint_spec`: the constraint that a client asks for, as plain data;
- `compiler`: compiles a spec for one tokenizer; takes up to seconds, and keeps the result for the next request;
- `matcher`: the position of one completion in its constraint, and the tokens that may come next;
- `marker`: the free part of a completion whose constraint begins after a marker, and its end;
- `regex_check`, `schema_check`: refuse what the compiler would silently misread.
"""
