"""What concerns a process and not its work: log lines, progress, signals, deadlines, files, garbage collection."""
