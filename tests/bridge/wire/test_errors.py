"""Errors on the wire: the exception at one end is the exception at the other."""

from trainer_bridge.wire.errors import Overloaded, RolloutError, WeightsRejected, error_reply, from_reply


def test_an_error_arrives_with_all_that_it_says() -> None:
    for error in (
        Overloaded("full", retry_after_s=1.5),
        WeightsRejected("does not fit", field="manifest"),
        RolloutError("new", code="of a later version"),
    ):
        arrived = from_reply(error_reply(error))
        assert type(arrived) is type(error) and str(arrived) == str(error)
        assert (arrived.code, arrived.field, arrived.retry_after_s) == (error.code, error.field, error.retry_after_s)
