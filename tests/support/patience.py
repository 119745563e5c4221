"""How long tests wait for what must come."""

#: Seconds. Two processes with transformers may start beside each other on a busy machine; waiting costs a test that
#: passes nothing. Below the time limit of a test.
PATIENCE_S = 150
