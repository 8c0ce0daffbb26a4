"""A small SSH server on loopback, in a thread of the test process: real protocol, shell, SFTP, forwarding."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from pathlib import Path

import asyncssh


class SshServer:
    """Listens while used as a context manager. Its files lie in `root`: client_key, known_hosts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.key = root / "client_key"
        self.known_hosts = root / "known_hosts"
        self.user = "tester"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._connections: list[asyncssh.SSHServerConnection] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> SshServer:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return self

    def __exit__(self, *exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def drop_connections(self) -> None:
        """Cut every connection as a dying sshd would."""

        async def drop() -> None:
            for connection in self._connections:
                connection.abort()

        asyncio.run_coroutine_threadsafe(drop(), self._loop).result(10)

    async def _listen(self) -> None:
        host_key, client_key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
        self.key.write_bytes(client_key.export_private_key())
        self.key.chmod(0o600)
        (self.root / "authorized_keys").write_bytes(client_key.export_public_key())
        server = self

        class Sessions(asyncssh.SSHServer):
            def connection_made(self, connection: asyncssh.SSHServerConnection) -> None:
                server._connections.append(connection)

            def connection_requested(self, *where: object) -> bool:
                return True

        self._acceptor = await asyncssh.listen(
            "127.0.0.1",
            0,
            server_factory=Sessions,
            server_host_keys=[host_key],
            authorized_client_keys=str(self.root / "authorized_keys"),
            process_factory=self._process,
            sftp_factory=True,
            encoding=None,
            line_editor=False,
        )
        self.port = self._acceptor.get_port()
        self.host_key_line = host_key.export_public_key().decode().strip()
        self.known_hosts.write_text(f"[127.0.0.1]:{self.port} {self.host_key_line}\n")

    async def _end(self) -> None:
        for connection in self._connections:
            connection.abort()
        self._acceptor.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait_for(asyncio.gather(*self._tasks, return_exceptions=True), 5)

    async def _process(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            process.command or "true",
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
        feed = asyncio.ensure_future(_copy(process.stdin, child.stdin, close=True))
        try:
            await asyncio.gather(_copy(child.stdout, process.stdout), _copy(child.stderr, process.stderr))
            code = await child.wait()
            if code < 0:
                process.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
            else:
                process.exit(code)
        finally:
            feed.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()


async def _copy(reader, writer, close: bool = False) -> None:
    with contextlib.suppress(asyncssh.Error, OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        if close:
            writer.close()
