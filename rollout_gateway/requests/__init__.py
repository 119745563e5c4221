"""One request of a client on its way to the workers and back, for every dialect; orders that several dialects have."""
