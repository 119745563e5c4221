"""A TCP proxy in front of one worker. It can cut its connections, like a network that fails."""

import asyncio
import contextlib

_READ_BYTES = 1 << 16


class Proxy:
    """Forwards bytes between clients and one worker. Used in one event loop."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._host, self._port = host, int(port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        """Listen; returns the endpoint for clients."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> int:
        """Cut all connections and drop their data in flight; returns their number."""
        cut = len(self._writers) // 2
        for writer in list(self._writers):
            writer.transport.abort()
        return cut

    async def close(self) -> None:
        """Stop listening."""
        assert self._server is not None
        self._server.close()
        self.cut()
        await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:  # the worker is down
            writer.transport.abort()
            return
        self._writers |= {writer, upstream_writer}
        try:
            await asyncio.gather(self._pass(reader, upstream_writer), self._pass(upstream_reader, writer))
        finally:
            self._writers -= {writer, upstream_writer}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_READ_BYTES):
                writer.write(data)
                await writer.drain()
        writer.close()
