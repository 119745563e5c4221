"""What concerns a process and not its work: settings, log lines, progress, signals, deadlines, files, and access."""
