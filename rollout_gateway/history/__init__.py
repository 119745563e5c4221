"""The data that a gateway keeps between requests: the tokens of conversations, and stored responses."""
