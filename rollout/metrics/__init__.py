"""What a worker reports of itself: the meter in the loop, the sinks in a thread of their own, the timeline picture."""

from rollout.metrics.meter import Meter, StepRecord
from rollout.metrics.report import METRICS, Metric
from rollout.metrics.sinks import JsonlSink, MetricsThread, Report, Sink
from rollout.metrics.timeline import write_timeline
from rollout.metrics.wandb_sink import WandbSink

__all__ = [
    "METRICS",
    "JsonlSink",
    "Meter",
    "Metric",
    "MetricsThread",
    "Report",
    "Sink",
    "StepRecord",
    "WandbSink",
    "write_timeline",
]
