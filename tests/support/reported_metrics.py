"""Which metrics a report has."""


def needs_no_drafts(metric: str) -> bool:
    """Whether a worker that drafted nothing reports this metric, given by name."""
    return not metric.startswith("speculation/accepted_")
