"""Tasks of verifiers with a tool. verifiers imports this file by its name and starts its tool server as a program."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf


class Adding(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """A tool server of its own process."""

    TOOL_PREFIX = "sums"

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class Sum(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """Scored by its calls of the tool."""

    @classmethod
    def toolsets(cls, config: vf.TaskConfig) -> list[vf.Toolset]:
        return [Adding(vf.ToolsetConfig())]

    @vf.reward
    async def answered_calls(self, trace: vf.Trace) -> float:
        return float(sum(str(message.content).isdigit() for message in trace.tool_messages))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self) -> Iterator[Sum]:
        for number in range(3):
            yield Sum(vf.TaskData(prompt=f"add {number}"), self.config.task)


__all__ = ["Sums"]

if __name__ == "__main__":
    Adding.run()
