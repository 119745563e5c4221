"""Parts of a process apart from its work: log lines, progress, signals, deadlines, files, garbage collection."""
