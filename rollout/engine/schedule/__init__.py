"""Who runs next: requests, sequences, the queue, preemption, the plan of a step."""
