"""Compilations whose end Triton reports, and those whose end it does not report."""

from rollout.process.compiling import MOST_S, Compilations


def test_a_compilation_that_fails_is_forgotten_in_time() -> None:
    now_s = 1000.0
    kernels = Compilations(lambda: now_s)
    assert not kernels.running()
    assert kernels.begins() is False, "true would stop it"
    kernels.begins()
    assert kernels.running()
    kernels.ended()
    assert kernels.running()  # the other one
    now_s += MOST_S
    assert not kernels.running()
    kernels.begins()
    assert kernels.running()
    kernels.ended()
    assert not kernels.running()


def test_many_count_until_long_after_the_last_one_that_ended() -> None:
    now_s = 1000.0
    kernels = Compilations(lambda: now_s)
    kernels.begins(is_manual_warmup=True)
    assert not kernels.running(), "it may be asked for several times"
    with kernels.many():
        for _ in range(3):
            assert kernels.running()
            now_s += MOST_S - 1
            kernels.begins(is_manual_warmup=True)
            kernels.ended(is_manual_warmup=True)
        assert kernels.running()
        now_s += MOST_S
        assert not kernels.running(), "one hangs"
        kernels.begins(is_manual_warmup=False)
        kernels.ended(is_manual_warmup=False)
    assert not kernels.running()
