"""The ways for an update's bytes from a trainer to a worker; `base` says what each must do."""
