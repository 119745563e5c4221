"""Formats of what models write: reasoning, content and tool calls in the text of a completion.

known_formats   the formats by name, as transformers' response templates
segments        cuts text into the regions of a format, as it arrives
calls           the tool calls of a region, parsed by transformers
chat_turns      what a model's chat template writes around an answer, found by rendering
format_chooser  which formats a model uses
"""
