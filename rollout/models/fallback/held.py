HELD: tuple[str, ...] = ()
