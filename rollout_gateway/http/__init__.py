"""HTTP itself, whatever the dialect: connections, access, bodies, errors, JSON and streams of events."""
