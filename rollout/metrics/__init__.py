"""The measurements of a worker, and its reports.

    definitions      every metric, declared once: name, kind, unit, reader, meaning, where it is shown
    meter            counts steps, swaps and completions in the loop, and makes reports
      step_timing    when one step, or one swap, happened
      samples        sums, means and quantiles of a stretch of time
      histogram      counts by size
      idle           why the compute stream was idle
      by_version     one row for each weights version
      mismatch       a trainer's log-probs compared with the worker's
    sinks            the metrics thread, and the JSON-lines file
      wandb_sink, wandb_mode   Weights & Biases     prometheus   the metrics port
    recording        the last steps as they travel to `rollout trace`
      chrome_trace   as a Chrome trace          overlap      as a picture of host and device

Modules are imported by name: this package imports none of them, so that `rollout trace` and `rollout top` need neither
torch nor pydantic.
"""
