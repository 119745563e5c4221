"""The schedule: the queue, rows, preemption, the plan of a step, its commit."""
