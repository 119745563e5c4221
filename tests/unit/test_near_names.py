"""The name that was probably meant."""

import pytest

from trainer_bridge.wire.near_names import near_name, remedy

KNOWN = ["max_tokens", "temperature", "seed"]


@pytest.mark.parametrize(("name", "near"), [("max_token", "max_tokens"), ("tempraturre", "temperature"), ("xyz", "")])
def test_a_similar_name_is_found_and_another_one_is_not(name: str, near: str) -> None:
    assert near_name(name, KNOWN) == near
    assert remedy(name, KNOWN, "sampling.") == (f"did you mean 'sampling.{near}'?" if near else "remove it")


def test_of_a_long_name_the_beginning_is_compared() -> None:
    long = "a" * 200
    assert near_name(long + "b" * 10**7, [long]) == long
